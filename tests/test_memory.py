"""Peak memory, measured through full Inductor: flat in the number of tokens, and below one tensor of logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

FEATURES, VOCABULARY = 64, 8000  # no token count of the tests
CHUNK_BYTES = 4 << 20
MIB = 1 << 20


def loss_of(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight).float() / 0.9
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -(torch.exp(log_probs - log_probs.detach()) * torch.cos(labels.float())).mean()


def arguments(tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, FEATURES, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, FEATURES, generator=generator) * 0.1).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (tokens,), generator=generator).to(device)


def compiled(kind: str) -> Callable[..., torch.Tensor]:
    """ "eager", "inductor", or ours with full code generation."""
    if kind == "eager":
        return loss_of
    if kind == "inductor":
        return torch.compile(loss_of, dynamic=True)
    from tests import harness

    options: dict[str, Any] = {"grpo.min_logits_bytes": 0, "grpo.chunk_bytes": CHUNK_BYTES}
    return torch.compile(loss_of, backend=harness.backend(), options=options, dynamic=True)


def resident() -> int:
    """Bytes resident now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def peak() -> int:
    """Highest resident set since the last :func:`forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measure(kind: str, counts: list[int]) -> dict[int, int]:
    """Peak bytes above inputs and gradients of one forward and backward, for each token count; runs in a subprocess."""
    call = compiled(kind)
    warm = arguments(512)
    call(*warm).backward()  # compiles, and grows every pool that does not depend on the tokens
    found = {}
    for tokens in counts:
        args = arguments(tokens)
        for leaf in args[:2]:
            leaf.grad = torch.zeros_like(leaf)
        torch.ones(1)
        forget_peak()
        before = resident()
        call(*args).backward()
        found[tokens] = peak() - before
    return found


def in_subprocess(kind: str, counts: list[int]) -> dict[int, int]:
    code = (
        f"import json; from tests.test_memory import measure; print('RESULT', json.dumps(measure({kind!r}, {counts})))"
    )
    # One arena and no thresholds that adapt: what is freed goes back, so that the peak is what was needed.
    fixed = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **fixed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return {int(tokens): size for tokens, size in json.loads(line.removeprefix("RESULT")).items()}


COUNTS = [2048, 4096, 8192, 16384]


def can_measure() -> bool:
    try:
        forget_peak()
        return peak() > 0
    except OSError:
        return False


@pytest.mark.skipif(not can_measure(), reason="this system does not let a process reset its peak resident set")
@pytest.mark.timeout(900)
def test_peak_resident_set_is_flat_in_the_tokens() -> None:
    logits = {tokens: tokens * VOCABULARY * 4 for tokens in COUNTS}
    eager = in_subprocess("eager", COUNTS[:2])
    ours = in_subprocess("inductor_grpo", COUNTS)
    table = "\n".join(f"{n}: {size / MIB:.0f} MiB, one logits tensor {logits[n] / MIB:.0f}" for n, size in ours.items())
    # The measurement itself works: eager holds more than one tensor of logits.
    assert eager[4096] > logits[4096], eager
    # The gradient of hidden, its saved copy and a few row values grow; nothing of tokens x vocabulary does.
    rows = 8 * (COUNTS[-1] - COUNTS[0]) * FEATURES * 4
    assert ours[COUNTS[-1]] - ours[COUNTS[0]] < rows + 8 * MIB, table
    assert ours[COUNTS[-1]] < 0.25 * logits[COUNTS[-1]], table
    # A handful of chunk-sized buffers, the gradient of the weight, and slack of the allocator.
    assert ours[COUNTS[0]] < 8 * CHUNK_BYTES + 8 * VOCABULARY * FEATURES * 4 + 16 * MIB, table


def test_no_buffer_of_the_outer_graph_is_as_large_as_the_logits() -> None:
    from tests import harness

    tokens = 331
    args = arguments(tokens)
    facts = harness.Graphs(frozenset({VOCABULARY}), frozenset({FEATURES}))
    with harness.recording(facts):
        harness.run(harness.compiled(loss_of, 64 * VOCABULARY * 4), args)
    harness.assert_streamed(facts)
    saved = sum(r.bytes_before - r.bytes_after for report in facts.reports for r in report.rewrites)
    # One tensor of logits, less one chunk of them.
    assert saved >= (tokens - 64) * VOCABULARY * 4, saved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_peak_on_the_device_is_flat_in_the_tokens() -> None:
    call = compiled("inductor_grpo")
    call(*arguments(512, "cuda", torch.bfloat16)).backward()
    found = {}
    for tokens in (2048, 4096, 8192, 16384, 32768):
        args = arguments(tokens, "cuda", torch.bfloat16)
        for leaf in args[:2]:
            leaf.grad = torch.zeros_like(leaf)
        call(*args).backward()  # a new size may autotune
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(*args).backward()
        torch.cuda.synchronize()
        found[tokens] = torch.cuda.max_memory_allocated() - before
    rows = 8 * (32768 - 2048) * FEATURES * 4
    assert found[32768] - found[2048] < rows + 8 * MIB, found
    assert found[32768] < 0.25 * 32768 * VOCABULARY * 2, found
