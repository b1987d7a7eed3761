"""What ``bench`` measures: time, peak memory, error against float64."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from inductor_grpo.tools.bench_losses import Inputs, Loss, Shape, Step

MIB = 2**20
TRAINED = ("hidden", "weight")


@dataclasses.dataclass
class Timing:
    """Milliseconds: median, least and most, and the median of the floor beside it; seconds of the first call."""

    ms: float
    low: float
    high: float
    floor_ms: float
    first_s: float


def floor(x: Inputs, training: bool) -> Callable[[], object]:
    """The matmuls alone: logits, and for training the two gradients."""
    hidden, weight = x["hidden"].detach(), x["weight"].detach()

    def run() -> None:
        logits = torch.mm(hidden, weight.t())
        if training:
            torch.mm(logits, weight)
            torch.mm(logits.t(), hidden)

    return run


def step_of(function: Step, x: Inputs) -> Callable[[], object]:
    """One forward and, where there is a gradient, backward; the gradients are dropped."""

    def run() -> None:
        loss = function(x)
        if loss.requires_grad:
            loss.backward()
            for name in TRAINED:
                x[name].grad = None

    return run


def timed(run: Callable[[], object], floor: Callable[[], object], device: str, repeats: int) -> Timing:
    """The time of ``run``, after two calls that warm up.

    The floor is timed in turn with it: a device that gets warm slows its matmuls down by a tenth, and what is compared
    has to meet the same device."""
    first = _seconds(run, device)
    _seconds(run, device)
    gc.collect()
    times, floors = [], []
    for _ in range(repeats):
        floors.append(1e3 * _seconds(floor, device))
        times.append(1e3 * _seconds(run, device))
    return Timing(statistics.median(times), min(times), max(times), statistics.median(floors), first)


def _seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def peak_mib(run: Callable[[], object], device: str) -> float:
    """MiB of one call above what is allocated before it: of the allocator on CUDA, by the profiler on a CPU."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        wait(device)
        return (torch.cuda.max_memory_allocated() - base) / MIB
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run()
    kineto = getattr(profile.profiler, "kineto_results", None)
    if kineto is None:
        return float("nan")
    changes = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most / MIB


def gradients_mib(x: Inputs) -> float:
    """MiB of the gradients that a step must leave."""
    return sum(x[name].numel() * x[name].element_size() for name in TRAINED if x[name].requires_grad) / MIB


def results(function: Step, x: Inputs) -> dict[str, Tensor]:
    """The value of one step and the gradients of hidden and weight."""
    loss = function(x)
    found = {"value": loss.detach()}
    if loss.requires_grad:
        loss.backward()
        for name in TRAINED:
            gradient = x[name].grad
            assert gradient is not None
            found[name], x[name].grad = gradient, None
    return found


def exact(loss: Loss, shape: Shape, x: Inputs) -> dict[str, Tensor]:
    """The same in float64."""
    wide = {name: t.detach().double() if t.is_floating_point() else t for name, t in x.items()}
    for name in TRAINED if loss.training else ():
        wide[name].requires_grad_()
    with torch.set_grad_enabled(loss.training):
        return results(lambda given: loss.in_parts(given, shape.soft_cap), wide)


def errors(found: dict[str, Tensor], known: dict[str, Tensor]) -> dict[str, float]:
    """Of each result the norm of the difference over the norm of what is right."""
    relative = {}
    for name, right in known.items():
        size = right.norm().item()
        relative[name] = (found[name].double() - right).norm().item() / (size or 1.0)
    return relative


def wait(device: str) -> None:
    """Until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
