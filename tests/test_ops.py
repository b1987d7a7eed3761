"""The run-time operator: hand-written chunk programs against float64, for every chunk size and row count that can go wrong."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import inductor_grpo.ops
from inductor_grpo import body as bodies
from inductor_grpo import runtime
from inductor_grpo._compat import codegen
from inductor_grpo.program import Program, Projection, Sink

H, V = 24, 50
SIZES = (0, 1, 2, 5, 17, 64)
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)
DEVICES = ["cpu", CUDA]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def forward_program(dtype: torch.dtype, biased: bool = False, vocabulary: int | str = V) -> Program:
    """Selected log-probability and logsumexp; rows: hidden, labels [n, 1]; whole: weight [H, V] (, bias)."""
    up = "float64" if dtype == torch.float64 else "float32"
    body = f"""def body(n, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.{up})
    v1 = torch.ops.aten.amax.default(v0, [1], True)
    v2 = torch.ops.aten.sub.Tensor(v0, v1)
    v3 = torch.ops.aten.exp.default(v2)
    v4 = torch.ops.aten.sum.dim_IntList(v3, [1], True)
    v5 = torch.ops.aten.log.default(v4)
    v6 = torch.ops.aten.sub.Tensor(v2, v5)
    v7 = torch.ops.aten.gather.default(v6, 1, rows[1])
    v8 = torch.ops.aten.add.Tensor(v1, v5)
    return (v7, v8)
"""
    return Program(
        (Projection(0, 0, 1 if biased else None),), body, (Sink("row", 0, None, 1, up), Sink("row", 1, None, 1, up))
    )


def backward_program(
    dtype: torch.dtype,
    outer: str = "outer",
    accumulate: str = "float32",
    biased: bool = False,
    vocabulary: int | str = V,
    grad_dtype: torch.dtype | None = None,
) -> Program:
    """dX, dW (, dbias); rows: hidden, labels, logsumexp [n, 1], upstream gradient [n, 1]; whole: weight, its transpose (, bias)."""
    up = "float64" if dtype == torch.float64 else "float32"
    width = "syms[0]" if isinstance(vocabulary, str) else str(vocabulary)
    body = f"""def body(n, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.{up})
    v1 = torch.ops.aten.sub.Tensor(v0, rows[2])
    v2 = torch.ops.aten.exp.default(v1)
    v3 = torch.ops.prims.iota.default({width}, start=0, step=1, dtype=torch.int64, device=logits[0].device, requires_grad=False)
    v4 = torch.ops.aten.eq.Tensor(torch.ops.aten.unsqueeze.default(v3, 0), rows[1])
    v5 = torch.ops.prims.convert_element_type.default(v4, torch.{up})
    v6 = torch.ops.aten.sub.Tensor(v5, v2)
    v7 = torch.ops.aten.mul.Tensor(v6, rows[3])
    v8 = torch.ops.prims.convert_element_type.default(v7, torch.{name(dtype)})
    return (v8,)
"""
    result = name(grad_dtype or dtype)
    sinks = [
        Sink("contract", 0, 1, vocabulary, name(dtype)),
        Sink(outer, 0, 0, vocabulary, result, accumulate),  # type: ignore[arg-type]
    ]
    if biased:
        sinks.append(Sink("total", 0, None, vocabulary, result, accumulate))
    return Program((Projection(0, 0, 2 if biased else None),), body, tuple(sinks))


def inputs(
    n: int, dtype: torch.dtype, device: str = "cpu", v: int = V, h: int = H, seed: int = 0
) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {
        "x": torch.randn(n, h, generator=g).to(dtype),
        "w": (torch.randn(v, h, generator=g) * 0.3).to(dtype),
        "b": torch.randn(v, generator=g).to(dtype),
        "labels": torch.randint(0, v, (n, 1), generator=g),
        "g": torch.randn(n, 1, generator=g).to(torch.float64 if dtype == torch.float64 else torch.float32),
    }
    return {key: value.to(device) for key, value in made.items()}


def call(program: Program, rows, whole, n, syms=(), chunk_bytes=0, mode="inductor"):
    return torch.ops.inductor_grpo.rows(rows, whole, n, list(syms), program.to_text(), chunk_bytes, mode)


def reference(t: dict[str, torch.Tensor], biased: bool = False) -> dict[str, torch.Tensor]:
    """float64 autograd on the same (already rounded) operands."""
    x, w, b = (t[k].double().requires_grad_() for k in ("x", "w", "b"))
    logits = x @ w.t() + (b if biased else 0)
    lse = logits.logsumexp(1, keepdim=True)
    lp = logits.gather(1, t["labels"]) - lse
    (lp * t["g"].double()).sum().backward()
    return {"lp": lp.detach(), "lse": lse.detach(), "dx": x.grad, "dw": w.grad, "db": b.grad if biased else None}


def close(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert value.shape == expected.shape
    assert value.is_contiguous()
    if value.numel():
        error = (value.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= tolerance, float(error)


def both(t, n, dtype, chunk_bytes, mode, biased=False, **kw):
    """Forward and backward of the selected log-probability through the op."""
    bias = [t["b"]] if biased else []
    lp, lse = call(forward_program(dtype, biased), [t["x"], t["labels"]], [t["w"].t(), *bias], n, (), chunk_bytes, mode)
    grads = call(
        backward_program(dtype, biased=biased, **kw),
        [t["x"], t["labels"], lse, t["g"]],
        [t["w"].t(), t["w"], *bias],
        n,
        (),
        chunk_bytes,
        mode,
    )
    return (lp, lse, *grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_pass_matches_float64_for_every_size(device, mode, dtype):
    row = V * dtype.itemsize
    for n in SIZES:
        t = inputs(n, dtype, device)
        expected = reference(t, biased=True)
        for chunk_bytes in (0, row, 3 * row, 16 * row, 40 * row):
            got = both(t, n, dtype, chunk_bytes, mode, biased=True)
            for value, key in zip(got, ("lp", "lse", "dx", "dw", "db"), strict=True):
                want = expected[key] if key != "db" else expected[key][None]
                # log-probabilities carry the rounding of a bf16 logit; the rest is relative to its own size
                close(value, want, TOLERANCE[dtype])
