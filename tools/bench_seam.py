"""The seam, forward and backward: kernels, GPU time and wall time of eager, stock torch.compile and this package.

    python -m inductor_grpo.tools.bench_seam --device cuda

The loss is Fast-LLM's shape of GSPO (:func:`inductor_grpo.patterns.segment_sums.weighted_by_label_count`).  All ways
run in one process.  Wall times are medians of a step that ends with a synchronisation, and of the same step without one
(host); the ways take turns step by step, because a machine's clock drifts more than they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inductor_grpo.backend import inductor_grpo
from inductor_grpo.explain import fresh_copy
from inductor_grpo.patterns.segment_sums import weighted_by_label_count

CASES = ("8192,64", "131072,512", "131072,512,unequal", "131072,512,unsorted")


def lengths_of(tokens: int, segments: int, kind: str, g: torch.Generator) -> Tensor:
    """How long each segment is; "unequal": one of 100,000 tokens among many of 10."""
    if kind == "unequal":
        short = (tokens - 100_000) // 10
        return torch.cat(
            [torch.full((short // 2,), 10), torch.tensor([100_000]), torch.full((short - short // 2,), 10)]
        )
    cuts = torch.sort(torch.randperm(tokens - 1, generator=g)[: segments - 1] + 1)[0]
    return torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]))


def make_inputs(tokens: int, segments: int, kind: str, device: str) -> tuple[Any, ...]:
    """The arguments of the loss."""
    g = torch.Generator().manual_seed(1)
    lengths = lengths_of(tokens, segments, kind, g)
    tokens, segments = int(lengths.sum()), len(lengths)
    ids = torch.repeat_interleave(torch.arange(segments), lengths)
    if kind == "unsorted":
        ids = ids[torch.randperm(tokens, generator=g)]
    labels = torch.bincount(ids, minlength=segments)[ids]
    new = torch.randn(tokens, generator=g)
    old, adv = new + 0.1 * torch.randn(tokens, generator=g), torch.randn(segments, generator=g)[ids]
    mask = torch.rand(tokens, generator=g) > 0.1
    moved = [t.to(device) for t in (new, mask, adv, old, ids, labels)]
    return moved[0].requires_grad_(), *moved[1:5], segments, moved[5], float(segments)


def step_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, Tensor]]:
    """One forward and backward; the loss and the gradient of the new log-probs."""

    def step() -> tuple[Tensor, Tensor]:
        args[0].grad = None
        loss, _ = function(*args)
        loss.backward()
        return loss.detach(), args[0].grad

    return step


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of a step on CUDA and their time in microseconds."""
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    counts, times = [], []
    for _ in range(5):
        with torch.profiler.profile(activities=kinds) as profile:
            step()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(len(events))
        times.append(sum(e.device_time for e in events))
    names = [f"{e.name[:40]} {e.device_time:.1f}" for e in events]
    return {"kernels": statistics.median(counts), "gpu_us": statistics.median(times), "names": names}


def walls(steps: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, dict[str, float]]:
    """Wall time of each step in microseconds: until the device is done, and until the host is."""
    hosts: dict[str, list[float]] = {way: [] for way in steps}
    whole: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(repeats + 10):
        for way, step in steps.items():
            start = time.perf_counter()
            step()
            host = time.perf_counter()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 10:  # the first warm up
                hosts[way].append(host - start)
                whole[way].append(time.perf_counter() - start)
    return {
        way: {"wall_us": 1e6 * statistics.median(whole[way]), "host_us": 1e6 * statistics.median(hosts[way])}
        for way in steps
    }


def ways_of(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The loss in each way; each is compiled from a copy, so that none shares another's compilations."""
    return {
        "eager": loss,
        "torch.compile": torch.compile(fresh_copy(loss), dynamic=False),
        "dynamic=True": torch.compile(fresh_copy(loss), dynamic=True),
        "ours": torch.compile(fresh_copy(loss), backend=inductor_grpo),
    }


def error(value: Tensor, truth: Tensor) -> float:
    """Relative to the largest element."""
    return float((value.double() - truth).abs().max() / truth.abs().max())


def main() -> None:
    """The table, and each row as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="tokens,segments[,unequal|unsorted]")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each way")
    chosen = parser.parse_args()
    print(f"torch {torch.__version__}, {chosen.device}")
    heads = ("kernels", "GPU us", "wall us", "host us", "loss err", "grad err")
    print(f"{'case':24s} {'way':14s}", *(f"{head:>9s}" for head in heads))
    for case in chosen.cases:
        tokens, segments, *kind = case.split(",")
        args = make_inputs(int(tokens), int(segments), kind[0] if kind else "", chosen.device)
        wide = tuple(a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        wide[0].requires_grad_()
        truth = step_of(weighted_by_label_count, wide)()
        steps, rows = {}, {}
        for way, function in ways_of(weighted_by_label_count).items():
            step = step_of(function, args)
            try:
                errors = [error(a, b) for a, b in zip(step(), truth)]
                rows[way] = {"case": case, "way": way, "loss_error": errors[0], "grad_error": errors[1]}
                rows[way] |= kernels(step) if chosen.device == "cuda" else {}
                steps[way] = step
            except Exception as failure:  # the other ways still count
                print(f"{case:24s} {way:14s} {type(failure).__name__}: {str(failure).splitlines()[0][:80]}")
        for way, times in walls(steps, chosen.device, chosen.repeats).items():
            row = rows[way] | times
            names = row.pop("names", [])
            numbers = [row.get("kernels", math.nan), row.get("gpu_us", math.nan), row["wall_us"], row["host_us"]]
            errors = [row["loss_error"], row["grad_error"]]
            shown = [f"{numbers[0]:9.0f}", *(f"{x:9.1f}" for x in numbers[1:]), *(f"{x:9.1e}" for x in errors)]
            print(f"{case:24s} {way:14s}", *shown)
            if chosen.kernels:
                print("    " + "\n    ".join(names))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
