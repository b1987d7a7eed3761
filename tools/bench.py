"""Time and memory of a loss, eager, compiled by stock torch and by this package, beside the matmuls alone.

    python -m inductor_grpo.tools.bench --device cuda --shape 8192,4096,151936 --loss grpo

Every way runs in one process, in turn.  Memory is the peak above the inputs (and the gradients that must exist); CUDA
only, since a process's resident set never shrinks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo.backend import inductor_grpo

MIB = 2**20
Inputs = dict[str, Tensor]


def make_inputs(n: int, h: int, v: int, dtype: torch.dtype, device: str, live: float = 1.0) -> Inputs:
    """Hidden ``[n, h]``, weight ``[v, h]``, labels, old log-probs, advantages and mask ``[n]`` of a plausible step; a
    share of ``live`` rows is unmasked."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, h, generator=g, device=device).to(dtype)
    weight = (torch.randn(v, h, generator=g, device=device) * h**-0.5).to(dtype)
    labels = torch.randint(0, v, (n,), generator=g, device=device)
    noise = 0.1 * torch.randn(n, generator=g, device=device)
    old = noise + torch.cat(
        [
            F.linear(x, weight).float().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
            for x, y in zip(hidden.split(512), labels.split(512))
        ]
    )
    return {
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "old": old,
        "advantages": torch.randn(n, generator=g, device=device),
        "mask": (torch.rand(n, generator=g, device=device) < live).float(),
    }


def log_probs(x: Inputs) -> Tensor:
    """As people write it."""
    logits = F.linear(x["hidden"], x["weight"]).float()
    return logits.log_softmax(-1).gather(-1, x["labels"].unsqueeze(-1)).squeeze(-1)


def clipped(logp: Tensor, x: Inputs) -> Tensor:
    """The clipped objective of each token."""
    ratio = torch.exp(logp - x["old"])
    return -torch.min(ratio * x["advantages"], ratio.clamp(0.8, 1.2) * x["advantages"])


def grpo(x: Inputs) -> Tensor:
    """Token-level GRPO."""
    return clipped(log_probs(x), x).mean()


def grpo_entropy(x: Inputs) -> Tensor:
    """The same with an entropy bonus."""
    logp = F.linear(x["hidden"], x["weight"]).float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (clipped(logp.gather(-1, x["labels"].unsqueeze(-1)).squeeze(-1), x) - 0.01 * entropy).mean()


def masked(x: Inputs) -> Tensor:
    """Token-level GRPO over the unmasked tokens."""
    return (clipped(log_probs(x), x) * x["mask"]).sum() / x["mask"].sum()


def gspo(x: Inputs) -> Tensor:
    """Ratios of whole sequences, eight in a padded batch."""
    rows = {name: x[name].view(8, -1) for name in ("old", "advantages", "mask")}
    difference = (log_probs(x).view(8, -1) - rows["old"]) * rows["mask"]
    ratio = torch.exp(difference.sum(-1, keepdim=True) / rows["mask"].sum(-1, keepdim=True))
    objective = torch.min(ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"])
    return -(objective * rows["mask"]).sum() / rows["mask"].sum()


def forward(x: Inputs) -> Tensor:
    """Log-probs alone, without gradients."""
    with torch.no_grad():
        return log_probs(x)


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    "grpo": grpo,
    "entropy": grpo_entropy,
    "forward": forward,
    "masked": masked,
    "gspo": gspo,
}


def floor(x: Inputs, training: bool) -> Callable[[], object]:
    """The matmuls alone: logits, and for training the two gradients."""
    hidden, weight = x["hidden"].detach(), x["weight"].detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    grads = (torch.empty_like(hidden), torch.empty_like(weight))

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        if training:
            torch.mm(logits, weight, out=grads[0])
            torch.mm(logits.t(), hidden, out=grads[1])

    return run


def step_of(function: Callable[[Inputs], Tensor], x: Inputs) -> Callable[[], object]:
    """One forward and, where there is a gradient, backward."""

    def run() -> None:
        loss = function(x)
        if loss.requires_grad:
            loss.backward()
            x["hidden"].grad = x["weight"].grad = None

    return run


def measure(run: Callable[[], object], device: str, repeats: int) -> dict[str, float]:
    """Median and spread in milliseconds, and the peak of memory in MiB above what was allocated before."""
    first = time.perf_counter()
    run()
    _wait(device)
    first = time.perf_counter() - first
    run()
    _wait(device)
    gc.collect()
    base = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    peak = (torch.cuda.max_memory_allocated() - base) / MIB if device == "cuda" else float("nan")
    return {"ms": statistics.median(times), "low": min(times), "high": max(times), "peak": peak, "first_s": first}


def resident_peak(function: Callable[[Inputs], Tensor], shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """MiB by which one step of a CPU process goes above its inputs and gradients; compiles on few tokens before it
    looks."""
    for tokens in (512, 513, shape[0]):  # the second makes the number of tokens symbolic, as training does
        x = make_inputs(tokens, shape[1], shape[2], dtype, "cpu")
        for name in ("hidden", "weight"):
            x[name].requires_grad_().grad = torch.zeros_like(x[name])
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forgets the peak so far
        with open("/proc/self/statm") as file:
            before = int(file.read().split()[1]) * 4096
        loss = function(x)
        if loss.requires_grad:
            loss.backward()
    with open("/proc/self/status") as file:
        high = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return (high - before) / MIB


def memory_table(given: argparse.Namespace) -> None:
    """One process for each way and shape."""
    # One arena and no thresholds that adapt: what is freed goes back, so that the peak is what was needed.
    fixed = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for shape in given.shape:
        n, _, v = map(int, shape.split(","))
        logits = n * v * getattr(torch, given.dtype).itemsize / MIB
        cells = []
        for way in given.ways.split():
            command = [sys.executable, "-m", "inductor_grpo.tools.bench", "--device", "cpu", "--one", way]
            command += ["--shape", shape, "--loss", given.loss, "--dtype", given.dtype]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **fixed}, check=False)
            value = done.stdout.split()[-1] if done.returncode == 0 else f"failed: {done.stderr.splitlines()[-1:]}"
            cells.append(f"{way} {value}")
        sys.stdout.write(
            f"{given.loss} N={n} {given.dtype}: one logits tensor {logits:.0f} MiB; peak MiB: {', '.join(cells)}\n"
        )
        sys.stdout.flush()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ways(loss: Callable[[Inputs], Tensor], names: list[str]) -> Iterator[tuple[str, Callable[[Inputs], Tensor]]]:
    """The implementations to compare, made when their turn comes."""
    for name in names:
        torch._dynamo.reset()
        kind, _, extra = name.partition(":")
        options: dict[str, Any] = {"grpo.min_logits_bytes": 0}
        for item in filter(None, extra.split(",")):
            key, _, given = item.partition("=")
            options[f"grpo.{key}"] = json.loads(given) if given[:1] in "[{0123456789" else given
        if kind == "eager":
            yield name, loss
        elif kind == "compile":
            yield name, torch.compile(loss)
        elif kind == "ours":
            yield name, torch.compile(loss, backend=inductor_grpo, options=options)
        else:
            raise SystemExit(f"unknown way {name!r}: eager, compile, ours or ours:option=value,...")


def main(argv: list[str] | None = None) -> int:
    """Prints one table for each shape."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", action="append", help="tokens,hidden,vocabulary (repeat for more)")
    parser.add_argument("--loss", default="grpo", choices=sorted(LOSSES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--ways", default="eager compile ours", help="separated by blanks; ours:chunk_bytes=... sets options"
    )
    parser.add_argument("--live", type=float, default=1.0, help="share of unmasked tokens (masked, gspo)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="peak of the resident set instead of time (CPU)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    loss, dtype = LOSSES[given.loss], getattr(torch, given.dtype)
    if given.memory:
        memory_table(given)
        return 0
    if given.one:
        _, function = next(ways(loss, [given.one]))
        n, h, v = map(int, given.shape[0].split(","))
        sys.stdout.write(f"{resident_peak(function, (n, h, v), dtype):.0f}\n")
        return 0
    for shape in given.shape or ["1024,512,32000"]:
        n, h, v = map(int, shape.split(","))
        x = make_inputs(n, h, v, dtype, given.device, given.live)
        base = measure(floor(x, given.loss != "forward"), given.device, given.repeats)["ms"]
        gc.collect()
        sys.stdout.write(f"\n{given.loss} N={n} H={h} V={v} {given.dtype} {given.device}, floor {base:.2f} ms\n")
        sys.stdout.write(f"{'way':44s} {'ms':>9s} {'spread':>17s} {'x floor':>8s} {'MiB':>8s} {'first s':>8s}\n")
        if given.loss != "forward":
            x["hidden"].requires_grad_()
            x["weight"].requires_grad_()
        for name, function in ways(loss, given.ways.split()):
            try:
                row = measure(step_of(function, x), given.device, given.repeats)
            except Exception as error:
                sys.stdout.write(f"{name:44s} {type(error).__name__}: {str(error)[:200]}\n")
                continue
            spread = f"{row['low']:.1f}-{row['high']:.1f}"
            ratio = row["ms"] / base
            sys.stdout.write(
                f"{name:44s} {row['ms']:9.2f} {spread:>17s} {ratio:8.2f} {row['peak']:8.0f} {row['first_s']:8.1f}\n"
            )
            sys.stdout.flush()
            x["hidden"].grad = x["weight"].grad = None
            gc.collect()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
