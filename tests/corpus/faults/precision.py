"""Precision of casts, matmuls and accumulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.faults.inputs import head, naive, pick
from tests.corpus.faults.registry import case


@case("prec_bf16_upcast", "bf16 operands, logits.float() before softmax", "genlm/genlm-backend#66", group="precision")
def _():
    def fn(h, w, t):
        return pick(F.linear(h, w).float().log_softmax(-1), t)

    return (
        fn,
        head(n=33, h=64, v=257, dtype=torch.bfloat16),
        {},
        "fp32 result; logits themselves are rounded to bf16 first in eager",
    )


@case(
    "prec_softmax_dtype_arg",
    "log_softmax(..., dtype=float32) on bf16 logits",
    "verl-project/verl#2608",
    group="precision",
)
def _():
    def fn(h, w, t):
        return pick(F.log_softmax(F.linear(h, w), -1, dtype=torch.float32), t).to(h.dtype)

    return fn, head(n=33, h=64, v=257, dtype=torch.bfloat16), {}, "cast folded into the softmax node"


@case("prec_fp32_head_on_bf16", "both operands upcast before the matmul", "huggingface/trl#4303", group="precision")
def _():
    def fn(h, w, t):
        return pick(F.linear(h.float(), w.float()).log_softmax(-1), t)

    return (
        fn,
        head(n=33, h=64, v=257, dtype=torch.bfloat16),
        {},
        "full fp32 matmul: no bf16 rounding of logits, no TF32. Grads come back bf16",
    )


@case("prec_autocast", "fp32 parameters under CPU bf16 autocast", "axolotl-ai-cloud/axolotl#2847", group="precision")
def _():
    def fn(h, w, t):
        with torch.autocast("cpu", torch.bfloat16):
            return pick(F.linear(h, w).log_softmax(-1), t)

    return fn, head(n=21, h=32, v=65), {}, "matmul in bf16, log_softmax in fp32, grads fp32"


@case("prec_fp16_extreme", "fp16 logits at +-65504", "huggingface/trl#7221", group="precision")
def _():
    def fn(h, w, t):
        return pick(F.linear(h, w).float().log_softmax(-1), t)

    h = torch.tensor([[1.0, 0.0]], dtype=torch.float16)
    w = torch.tensor([[65504.0, 0.0], [-65504.0, 0.0], [65504.0, 0.0]], dtype=torch.float16)
    return fn, (h.requires_grad_(), w.requires_grad_(), torch.tensor([2])), {}, "-log 2, finite"


@case("prec_rare_token", "log-prob near -90", "genlm/genlm-backend#66", group="precision")
def _():
    h = torch.tensor([[30.0, 1.0]])
    w = torch.zeros(8, 2)
    w[3, 0] = 3.0
    return naive, (h.requires_grad_(), w.requires_grad_(), torch.tensor([5])), {}, "-90 to 1e-5 relative"


@case(
    "prec_weight_grad_many_rows",
    "bf16 weight gradient summed over 4096 rows",
    "linkedin/Liger-Kernel#1391",
    group="precision",
)
def _():
    def fn(h, w, t):
        return pick(F.linear(h, w).float().log_softmax(-1), t)

    return (
        fn,
        head(n=4096, h=8, v=17, dtype=torch.bfloat16),
        {},
        "accumulate weight grad in fp32 across chunks; error must not grow with chunk count",
    )


@case("prec_float64", "float64 end to end", "pytorch/pytorch#163774", group="precision")
def _():
    return naive, head(dtype=torch.float64), {}, "float64 accuracy (gradcheck passes), not fp32 inside"
