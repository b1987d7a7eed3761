"""The seam, forward and backward: kernels, GPU time and wall time of eager, stock torch.compile and this package.

    python -m inductor_grpo.tools.bench_seam --device cuda

The loss is Fast-LLM's shape of GSPO (:func:`inductor_grpo.patterns.segment_sums.weighted_by_label_count`).  All ways
run in one process, in turn; wall times are medians of a step that ends with a synchronisation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inductor_grpo.backend import inductor_grpo
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


def measure(step: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    """Kernels and their time in microseconds a step (CUDA), and wall time."""
    for _ in range(10):
        step()
    found: dict[str, float] = {}
    if device == "cuda":
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
        found |= {"kernels": statistics.median(counts), "gpu_us": statistics.median(times)}
        found["names"] = [f"{e.name[:40]} {e.device_time:.1f}" for e in events]  # type: ignore[assignment]
    walls = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    return found | {"wall_us": 1e6 * statistics.median(walls)}


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
    print(f"{'case':24s} {'way':14s} {'kernels':>7s} {'GPU us':>8s} {'wall us':>8s} {'loss err':>9s} {'grad err':>9s}")
    for case in chosen.cases:
        tokens, segments, *kind = case.split(",")
        args = make_inputs(int(tokens), int(segments), kind[0] if kind else "", chosen.device)
        wide = tuple(a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        wide[0].requires_grad_()
        truth = step_of(weighted_by_label_count, wide)()
        ways = {
            "eager": weighted_by_label_count,
            "torch.compile": torch.compile(weighted_by_label_count, dynamic=False),
            "ours": torch.compile(weighted_by_label_count, backend=inductor_grpo),
        }
        for way, function in ways.items():
            torch._dynamo.reset()
            step = step_of(function, args)
            try:
                errors = [error(a, b) for a, b in zip(step(), truth)]
                row = {"case": case, "way": way} | measure(step, chosen.device, chosen.repeats)
            except Exception as failure:  # the other ways still count
                print(f"{case:24s} {way:14s} {type(failure).__name__}: {str(failure).splitlines()[0][:80]}")
                continue
            kernels, gpu = row.get("kernels", float("nan")), row.get("gpu_us", float("nan"))
            print(
                f"{case:24s} {way:14s} {kernels:7.0f} {gpu:8.1f} {row['wall_us']:8.0f}",
                f"{errors[0]:9.1e} {errors[1]:9.1e}",
                flush=True,
            )
            names = row.pop("names", [])
            if chosen.kernels:
                print("    " + "\n    ".join(names))
            print(json.dumps(row | {"loss_error": errors[0], "grad_error": errors[1]}), flush=True)


if __name__ == "__main__":
    main()
