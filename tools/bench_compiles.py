"""Compilations and their cost: ours beside stock's, over the sizes that a training loop meets.

    python -m inductor_grpo.tools.bench_compiles [counts] [cost] [--device cuda] [--repeats 3]

``counts``: graphs compiled over a grid of segment counts, token counts and divisors, forward and backward.  The graphs
run without code generation, which does not change how often Dynamo compiles; ``--codegen`` generates code (stock then
fails on the CPU where there is exactly one segment).  Dynamo's limit of 8 compilations is lifted to show what it hides.

``cost``: seconds of the first call, forward and backward, in processes of their own: cold (an empty cache folder) and
warm (the folder that the cold process filled); seconds of the first call of another size (cold); microseconds of later
ones.  "once" is stock's code for the same graphs: ours, with every head left alone and nothing fused, so that what is
measured is one compilation for all sizes and no more.  The runs alternate, and the ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, VOCABULARY = 16, 211


# The losses -------------------------------------------------------------------------------------------------


def seam(
    logp: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old: Tensor,
    ids: Tensor,
    num_segments: int,
    lengths: Tensor,
    divisor: float,
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """A sequence-level loss over packed sequences: per-token terms, sums per segment, back to tokens."""
    log_ratio = (logp - old).reshape(-1)
    weights = mask.reshape(-1).to(log_ratio.dtype) / lengths.clamp(min=1)
    mean_ratio = log_ratio.new_zeros(num_segments).index_add_(0, ids, log_ratio * weights)
    mean_advantage = log_ratio.new_zeros(num_segments).index_add_(0, ids, advantages * weights)
    ratio, advantage = mean_ratio.exp()[ids], mean_advantage.detach()[ids]
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage) * mask.reshape(-1)
    return loss.sum() / divisor, mean_ratio


def seam_of_offsets(
    logp: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, offsets: Tensor, lengths: Tensor, divisor: float
) -> tuple[Tensor, Tensor]:
    """The same from cu_seqlens: the count is its length less one."""
    ids = torch.bucketize(torch.arange(logp.numel(), device=logp.device), offsets[1:], right=True)
    return seam(logp, mask, advantages, old, ids, offsets.numel() - 1, lengths, divisor)


def head_seam(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Head and seam in one graph."""
    logp = torch.log_softmax(F.linear(hidden, weight).float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return seam(logp, *rest)


def log_probs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities by log_softmax and gather."""
    logp = torch.log_softmax(logits.float() / temperature, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logp.sum(), logp


def log_probs_by_logsumexp(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same by logsumexp."""
    scaled = logits.float() / temperature
    logp = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, -1)
    return logp.sum(), logp


def cross_entropy(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same by cross_entropy."""
    scaled = logits.float() / temperature
    logp = -F.cross_entropy(scaled.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return logp.sum(), logp


# Their inputs -----------------------------------------------------------------------------------------------

Case = tuple[Any, ...]

STEPS: list[Case] = [(64, 5, 7.0), (128, 7, 8.0), (17, 1, 9.0), (1, 2, 1.0), (1, 1, 1.0), (2, 9, 2.5), (0, 0, 1.0)]
STEPS += [(4096, 1000, 13.0), (64, 3, 7.5), (3, 10000, 3.25), (9000, 11, 2.0), (64, 17, 3.0), (4096, 64, 4.0)]
SHAPES: list[Case] = [(2, 8, 1.0), (4, 16, 0.7), (1, 8, 1.1), (2, 1, 1.3), (1, 1, 0.8), (8, 100, 0.9), (1, 1024, 1.2)]


def packed(tokens: int, segments: int, device: str) -> tuple[Tensor, ...]:
    """logp, mask, advantages, old, ids, lengths [tokens]."""
    generator = torch.Generator().manual_seed(tokens + segments)
    logp, old, advantages = (torch.randn(tokens, generator=generator) * 0.1 - 1 for _ in range(3))
    mask = torch.rand(tokens, generator=generator) > 0.3
    ids = torch.randint(0, max(segments, 1), (tokens,), generator=generator).sort().values
    lengths = torch.zeros(max(segments, 1)).index_add_(0, ids, mask.float())[ids]
    return tuple(tensor.to(device) for tensor in (logp, mask, advantages, old, ids, lengths))


def of_seam(tokens: int, segments: int, divisor: float, device: str) -> list[Any]:
    """Arguments of :func:`seam`."""
    logp, mask, advantages, old, ids, lengths = packed(tokens, segments, device)
    return [logp.requires_grad_(), mask, advantages, old, ids, segments, lengths, divisor]


def of_offsets(tokens: int, segments: int, divisor: float, device: str) -> list[Any]:
    """Arguments of :func:`seam_of_offsets`."""
    logp, mask, advantages, old, ids, lengths = packed(tokens, segments, device)
    counts = torch.bincount(ids, minlength=segments)[:segments]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return [logp.requires_grad_(), mask, advantages, old, offsets, lengths, divisor]


def of_head(tokens: int, segments: int, divisor: float, device: str) -> list[Any]:
    """Arguments of :func:`head_seam`."""
    _, *rest = packed(tokens, segments, device)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / 4).to(device).requires_grad_()
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator).to(device)
    mask, advantages, old, ids, lengths = rest
    return [hidden, weight, labels, mask, advantages, old, ids, segments, lengths, divisor]


def of_logits(batch: int, time_: int, temperature: float, device: str) -> list[Any]:
    """Arguments of the log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch, time_, VOCABULARY, generator=generator).to(device).requires_grad_()
    return [logits, torch.randint(VOCABULARY, (batch, time_), generator=generator).to(device), temperature]


LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., list[Any]], list[Case]]] = {
    "seam": (seam, of_seam, STEPS),
    "seam, count from cu_seqlens": (seam_of_offsets, of_offsets, STEPS),
    "head and seam": (head_seam, of_head, STEPS),
    "log_softmax, gather": (log_probs, of_logits, SHAPES),
    "logsumexp": (log_probs_by_logsumexp, of_logits, SHAPES),
    "cross_entropy": (cross_entropy, of_logits, SHAPES),
}


def step(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs and the gradients of the tensors that ask for one."""
    outputs = function(*args)
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    return (*outputs, *torch.autograd.grad(outputs[0], wanted))


# Counts -----------------------------------------------------------------------------------------------------


def backend(name: str, codegen: bool) -> dict[str, Any]:
    """The arguments of ``torch.compile`` for "ours", "once" or "stock"."""
    if name == "stock":
        return {"backend": "inductor" if codegen else "aot_eager"}
    from inductor_grpo.backend import inductor_grpo

    options: dict[str, Any] = {"grpo.min_logits_bytes": 0, **({} if codegen else {"grpo.codegen": "eager"})}
    if name == "once":
        options["grpo.max_rewrites"] = 0
    return {"backend": inductor_grpo, "options": options}


def count(name: str, loss: str, dynamic: bool | None, fullgraph: bool, device: str, codegen: bool) -> str:
    """The graphs compiled over the cases of a loss, and the cases that failed or were wrong, if any."""
    from torch._dynamo.utils import counters

    function, inputs, cases = LOSSES[loss]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, dynamic=dynamic, fullgraph=fullgraph, **backend(name, codegen))
    bad = 0
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256):
        for case in cases:
            want = step(function, inputs(*case, device))
            try:
                got = step(compiled, inputs(*case, device))
                bad += not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(got, want))
            except Exception:  # stock on the CPU, one segment
                bad += 1
    return f"{counters['stats']['unique_graphs']}" + (f" ({bad} fail)" if bad else "")


def print_counts(device: str, codegen: bool) -> None:
    """The table of counts."""
    print(f"torch {torch.__version__}, {device}, {'Inductor' if codegen else 'graphs without code'}: compilations")
    print("| loss | steps | ours | ours, fullgraph | ours, dynamic=True | stock | stock, dynamic=True |")
    print("|---|---|---|---|---|---|---|")
    columns = [("ours", None, False), ("ours", None, True), ("ours", True, False)]
    columns += [("stock", None, False), ("stock", True, False)]
    for loss, (_, _, cases) in LOSSES.items():
        found = [count(name, loss, dynamic, full, device, codegen) for name, dynamic, full in columns]
        print(f"| {loss} | {len(cases)} | {' | '.join(found)} |", flush=True)


# Cost -------------------------------------------------------------------------------------------------------


def first_call(name: str, loss: str, device: str) -> None:
    """In a process of its own: prints seconds of the first call and of another size, microseconds of later calls."""

    def warm_up(x: Tensor) -> Tensor:
        return x.sin().sum()

    how = backend(name, True)
    torch.autograd.grad(torch.compile(warm_up, **how)(x := torch.ones(7, device=device, requires_grad=True)), x)
    function, inputs, cases = LOSSES[loss]
    compiled = torch.compile(function, **how)
    calls = []
    for case in cases[:2]:
        args = inputs(*case, device)
        begin = time.perf_counter()
        step(compiled, args)
        calls.append(time.perf_counter() - begin)
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        step(compiled, args)
        times.append(time.perf_counter() - begin)
    print(json.dumps([*calls, statistics.median(times) * 1e6]))


def measure(name: str, loss: str, device: str, folder: str) -> list[float]:
    """:func:`first_call` in a new process with that cache folder."""
    command = [sys.executable, "-m", "inductor_grpo.tools.bench_compiles", "first", name, loss, "--device", device]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [path for path in (root, os.environ.get("PYTHONPATH")) if path]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(paths)}
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if out.returncode:
        raise RuntimeError(out.stderr[-2000:])
    return [float(value) for value in json.loads(out.stdout.splitlines()[-1])]


def print_costs(device: str, repeats: int, losses: Sequence[str]) -> None:
    """The table of costs."""
    print(f"torch {torch.__version__}, {device}: the first call, forward and backward, medians of {repeats}")
    columns = ("cold", "warm", "another size", "later call")
    print(f"| loss | {' | '.join(f'{column}: ours, once, stock (ours and once / stock)' for column in columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    for loss in losses:
        found: dict[str, list[list[float]]] = {"ours": [], "once": [], "stock": []}
        for _ in range(repeats):
            for name, rows in found.items():
                with tempfile.TemporaryDirectory() as folder:
                    cold, warm = (measure(name, loss, device, folder) for _ in range(2))
                rows.append([cold[0], warm[0], cold[1], min(cold[2], warm[2])])
        middle = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in found.items()}
        cells = []
        for place, unit in enumerate(("s", "s", "s", "us")):
            ours, once, stock = (middle[name][place] for name in ("ours", "once", "stock"))
            digits = 0 if unit == "us" else 2
            numbers = ", ".join(f"{value:.{digits}f}" for value in (ours, once, stock))
            cells.append(f"{numbers} {unit} ({ours / stock:.2f}, {once / stock:.2f})")
        print(f"| {loss} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="*", default=["counts", "cost"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codegen", action="store_true", help="counts: generate code")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--losses", default="seam;head and seam;log_softmax, gather", help="cost: names, by semicolons")
    given = parser.parse_args()
    if given.what[0] == "first":
        first_call(given.what[1], given.what[2], given.device)
        return
    if "counts" in given.what:
        print_counts(given.device, given.codegen)
    if "cost" in given.what:
        print_costs(given.device, given.repeats, given.losses.split(";"))


if __name__ == "__main__":
    main()
