"""Non-finite values, indices out of range, odd sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.faults.inputs import head, naive, pick
from tests.corpus.faults.registry import case


@case(
    "inf_masked_vocab",
    "some vocab columns are -inf, targets are not among them",
    "NovaSky-AI/SkyRL#2259",
    group="nonfinite",
)
def _():
    def fn(h, w, t, blocked):
        return pick(F.linear(h, w).masked_fill(blocked, float("-inf")).log_softmax(-1), t)

    blocked = torch.zeros(37, dtype=torch.bool)
    blocked[30:] = True
    h, w, t = head()
    return fn, (h, w, t % 30, blocked), {}, "finite values and finite gradients"


@case("inf_whole_row", "a row of only -inf", "NovaSky-AI/SkyRL#2259", group="nonfinite", nonfinite=True)
def _():
    def fn(h, w, t, rowmask):
        return pick(F.linear(h, w).masked_fill(rowmask, float("-inf")).log_softmax(-1), t)

    rowmask = torch.zeros(13, 1, dtype=torch.bool)
    rowmask[2] = True
    return (
        fn,
        (*head(), rowmask),
        {},
        "row 2 nan in eager, other rows finite; running max must start so that m=-inf is safe",
    )


@case("entropy_plain", "log-prob and entropy from one softmax", "verl-project/verl#2656", group="nonfinite")
def _():
    def fn(h, w, t):
        lp = F.log_softmax(F.linear(h, w), -1)
        return pick(lp, t), -(lp.exp() * lp).sum(-1)

    return fn, head(), {}, "both, with both gradients; log-probs <= 0 and entropy in [0, log V]"


@case(
    "entropy_masked_vocab_nan",
    "naive entropy with -inf columns is 0 * -inf",
    "huggingface/trl#7221",
    group="nonfinite",
    nonfinite=True,
)
def _():
    def fn(h, w, t, blocked):
        lp = F.linear(h, w).masked_fill(blocked, float("-inf")).log_softmax(-1)
        return pick(lp, t), -(lp.exp() * lp).sum(-1)

    blocked = torch.zeros(37, dtype=torch.bool)
    blocked[30:] = True
    h, w, t = head()
    return fn, (h, w, t % 30, blocked), {}, "eager entropy is nan. Keep or fix, but document; never poison log-probs"


@case(
    "entropy_only",
    "log-prob is computed but only entropy is used in the loss",
    "verl-project/verl#1100",
    group="nonfinite",
)
def _():
    def fn(h, w, t):
        lp = F.log_softmax(F.linear(h, w), -1)
        return -(lp.exp() * lp).sum(-1), pick(lp, t).detach()

    return fn, head(), {}, "backward with a missing gradient for the log-prob output"


@case(
    "index_minus_100_gather",
    "-100 given straight to gather",
    "linkedin/Liger-Kernel#678",
    group="index",
    raises=(RuntimeError, IndexError),
)
def _():
    h, w, t = head()
    t[3] = -100
    return naive, (h, w, t), {}, "eager raises; a fused kernel must not read out of bounds or return a number"


@case(
    "index_too_large",
    "target == V (added token, head not resized)",
    "huggingface/trl#1941",
    group="index",
    raises=(RuntimeError, IndexError),
)
def _():
    h, w, t = head()
    t[3] = 37
    return naive, (h, w, t), {}, "eager raises (device assert on GPU)"


@case("index_clamped_then_masked", "clamp(min=0), gather, times mask", "radixark/miles#2796", group="index")
def _():
    def fn(h, w, labels):
        keep = labels != -100
        lp = naive(h, w, labels.clamp(min=0))
        return (lp * keep).sum() / keep.sum().clamp(min=1)

    h, w, t = head()
    t[::3] = -100
    return fn, (h, w, t), {}, "ignored rows: zero gradient"


@case(
    "index_ignore_ce",
    "cross_entropy(ignore_index=-100, reduction='none') times weights",
    "linkedin/Liger-Kernel#968",
    group="index",
)
def _():
    def fn(h, w, labels, tok_w):
        return F.cross_entropy(F.linear(h, w), labels, ignore_index=-100, reduction="none") * tok_w

    h, w, t = head()
    t[::3] = -100
    return fn, (h, w, t, torch.linspace(-1, 2, 13)), {}, "0 where ignored; per-token weights reach the gradient"


@case(
    "index_all_ignored_mean",
    "every label ignored, reduction='mean'",
    "linkedin/Liger-Kernel#177",
    group="index",
    nonfinite=True,
)
def _():
    def fn(h, w, labels):
        return F.cross_entropy(F.linear(h, w), labels, ignore_index=-100)

    h, w, t = head()
    return fn, (h, w, torch.full_like(t, -100)), {}, "eager gives nan loss; no ZeroDivisionError, no crash"


for _v in (1, 2, 127, 1021):

    @case(f"size_vocab_{_v}", f"vocabulary of {_v}", "apple/ml-cross-entropy#59", group="size")
    def _(v=_v):
        return naive, head(v=v), {}, "no tile-size assumption; padded tail columns must not match a sentinel index"


for _n in (0, 1, 129):

    @case(f"size_tokens_{_n}", f"{_n} tokens", "pytorch/pytorch#184454", group="size")
    def _(n=_n):
        return naive, head(n=n), {}, "shape [n]; 0 tokens gives an empty result and zero weight grad"


@case("size_hidden_1", "hidden size 1", "pytorch/pytorch#106067", group="size")
def _():
    return naive, head(h=1), {}, "equal to eager"


@case(
    "size_int32_overflow_meta",
    "N*V = 65536*50257 > 2**31, shape only",
    "pytorch/pytorch#85786",
    group="size",
    device="meta",
)
def _():
    n, h, v = 65536, 8, 50257
    return (
        naive,
        (
            torch.empty(n, h, device="meta", dtype=torch.bfloat16, requires_grad=True),
            torch.empty(v, h, device="meta", dtype=torch.bfloat16, requires_grad=True),
            torch.empty(n, device="meta", dtype=torch.long),
        ),
        {},
        "real run needs a GPU: row*V must be 64-bit. Check the last rows against a slice computed alone",
    )


@case(
    "size_int32_overflow_weight_meta",
    "V*H = 250880*14336 > 2**31, shape only",
    "NVIDIA/FasterTransformer#468",
    group="size",
    device="meta",
)
def _():
    return (
        naive,
        (
            torch.empty(4, 14336, device="meta", dtype=torch.bfloat16, requires_grad=True),
            torch.empty(250880, 14336, device="meta", dtype=torch.bfloat16, requires_grad=True),
            torch.empty(4, device="meta", dtype=torch.long),
        ),
        {},
        "weight offsets need 64-bit as well",
    )
