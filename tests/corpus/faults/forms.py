"""Shapes and spellings of the same computation; scaling, capping, bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.faults.inputs import head, ints, naive, pick, rand
from tests.corpus.faults.registry import case


@case("form_log_softmax_gather", "plain 2-D linear, log_softmax, gather", "huggingface/trl#2709", group="form")
def _():
    return naive, head(), {}, "equal to eager"


@case("form_batched_3d", "[B,L,H] hidden, [B,L] target", "huggingface/trl#2598", group="form")
def _():
    args = (rand(2, 7, 16, seed=1, grad=True), rand(37, 16, seed=2, grad=True), ints(37, 2, 7))
    return naive, args, {}, "equal to eager, output [2,7]"


@case("form_logsumexp", "selected logit minus logsumexp", "huggingface/trl#2773", group="form")
def _():
    def fn(hidden, weight, target):
        logits = F.linear(hidden, weight)
        return pick(logits, target) - torch.logsumexp(logits, dim=-1)

    return fn, head(), {}, "equal to eager to rounding"


@case("form_cross_entropy_none", "negative cross_entropy with reduction='none'", "OpenRLHF/OpenRLHF#878", group="form")
def _():
    def fn(hidden, weight, target):
        return -F.cross_entropy(F.linear(hidden, weight), target, reduction="none")

    return fn, head(), {}, "equal to eager"


@case("form_categorical", "torch.distributions.Categorical(logits).log_prob", "huggingface/trl#7221", group="form")
def _():
    def fn(hidden, weight, target):
        d = torch.distributions.Categorical(logits=F.linear(hidden, weight), validate_args=False)
        return d.log_prob(target)

    return fn, head(), {}, "equal to eager"


@case(
    "form_rolled_labels",
    "labels = roll(ids, -1), last column discarded later",
    "PrimeIntellect-ai/prime-rl#1525",
    group="form",
)
def _():
    def fn(hidden, weight, ids):
        return naive(hidden, weight, torch.roll(ids, -1, dims=1))[:, :-1]

    return (
        fn,
        (rand(2, 6, 8, seed=1, grad=True), rand(19, 8, seed=2, grad=True), ints(19, 2, 6)),
        {},
        "equal to eager; an off-by-one rewrite still looks plausible",
    )


@case("form_logits_to_keep", "only the last K positions reach the head", "huggingface/trl#2683", group="form")
def _():
    def fn(hidden, weight, ids, keep):
        return naive(hidden[:, -keep:, :], weight, ids[:, -keep:])

    return (
        fn,
        (rand(2, 9, 8, seed=1, grad=True), rand(19, 8, seed=2, grad=True), ints(19, 2, 9), 4),
        {},
        "equal to eager; hidden slice is non-contiguous",
    )


@case(
    "form_masked_select",
    "head applied to hidden[mask] (data-dependent rows)",
    "meta-pytorch/torchtune#2694",
    group="form",
)
def _():
    def fn(hidden, weight, ids, mask):
        return naive(hidden[mask], weight, ids[mask])

    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]], dtype=torch.bool)
    return (
        fn,
        (rand(2, 4, 8, seed=1, grad=True), rand(19, 8, seed=2, grad=True), ints(19, 2, 4), mask),
        {},
        "equal to eager or an ordinary graph break; never a wrong shape",
    )


@case(
    "form_logits_also_returned",
    "logits are an output as well",
    "unslothai/unsloth-zoo#708",
    group="form",
    must_not_fuse=True,
)
def _():
    def fn(hidden, weight, target):
        logits = F.linear(hidden, weight)
        return pick(logits.log_softmax(-1), target), logits

    return fn, head(), {}, "both outputs right; nothing is saved by streaming, so say it was not fused"


@case(
    "form_full_distribution_out",
    "the whole log-prob matrix is an output",
    "NVIDIA-NeMo/RL#3608",
    group="form",
    must_not_fuse=True,
)
def _():
    def fn(hidden, weight, target):
        lp = F.log_softmax(F.linear(hidden, weight), -1)
        return pick(lp, target), lp

    return fn, head(), {}, "must stay materialised"


@case("form_gather_topk", "K candidate ids per row, not one", "NVIDIA-NeMo/RL#3608", group="form")
def _():
    def fn(hidden, weight, ids):
        return F.log_softmax(F.linear(hidden, weight), -1).gather(-1, ids)

    h, w, _ = head()
    return fn, (h, w, ints(37, 13, 5)), {}, "output [13,5]; duplicates in a row add up in the gradient"


@case(
    "form_policy_and_reference",
    "same hidden, trainable head and frozen head in no_grad",
    "linkedin/Liger-Kernel#1082",
    group="form",
)
def _():
    def fn(hidden, weight, ref_weight, target):
        new = naive(hidden, weight, target)
        with torch.no_grad():
            ref = naive(hidden, ref_weight, target)
        d = ref - new
        return new, d.exp() - d - 1

    h, w, t = head()
    return fn, (h, w, rand(37, 16, seed=77, scale=0.5), t), {}, "two matches in one graph, one of them without grad"


@case("form_addmm_bias", "explicit addmm(bias, h, w.t())", "pytorch/pytorch#141639", group="form")
def _():
    def fn(hidden, weight, bias, target):
        return pick(torch.addmm(bias, hidden, weight.t()).log_softmax(-1), target)

    h, w, t = head()
    return fn, (h, w, rand(37, seed=5, grad=True), t), {}, "bias applied and gets a gradient"


@case("form_advanced_index", "lp[arange, target] instead of gather", "pytorch/pytorch#136329", group="form")
def _():
    def fn(hidden, weight, target):
        lp = F.log_softmax(F.linear(hidden, weight), -1)
        return lp[torch.arange(lp.shape[0]), target]

    return fn, head(), {}, "equal to eager, fused or reported as not fused"


@case(
    "form_user_chunked",
    "the user already loops over torch.chunk pieces with a ragged tail",
    "unslothai/unsloth-zoo#1054",
    group="form",
)
def _():
    def fn(hidden, weight, target):
        return torch.cat([naive(h, weight, t) for h, t in zip(hidden.chunk(4), target.chunk(4))])

    return fn, head(n=18), {}, "equal to eager; sizes 5,5,5,3. On some torch versions dynamic=True raised CantSplit"


@case("scale_temperature", "divide by a python float", "unslothai/unsloth-zoo#832", group="scale")
def _():
    def fn(h, w, t, temp):
        return pick((F.linear(h, w) / temp).log_softmax(-1), t)

    return fn, (*head(), 0.7), {}, "gradient carries 1/T"


@case("scale_temperature_one", "division by 1.0 may be folded away", "THUDM/slime#1428", group="scale")
def _():
    def fn(h, w, t, temp):
        return pick((F.linear(h, w) / temp).log_softmax(-1), t)

    return fn, (*head(), 1.0), {}, "still matches; graph has one node fewer"


@case("scale_temperature_0d_tensor", "0-d tensor temperature that needs grad", "verl-project/verl#6110", group="scale")
def _():
    def fn(h, w, t, temp):
        return pick((F.linear(h, w) / temp).log_softmax(-1), t)

    return fn, (*head(), torch.tensor(0.8, requires_grad=True)), {}, "temperature gets a gradient"


@case("scale_temperature_inplace", "logits.div_(T)", "OpenRLHF/OpenRLHF#857", group="scale")
def _():
    def fn(h, w, t, temp):
        logits = F.linear(h, w)
        logits.div_(temp)
        return pick(logits.log_softmax(-1), t)

    return fn, (*head(), 0.7), {}, "same as out of place"


@case("scale_tiny_temperature", "T = 1e-4", "SlopDotCash/asi#2865", group="scale")
def _():
    def fn(h, w, t, temp):
        return pick((F.linear(h, w) / temp).log_softmax(-1), t)

    return fn, (*head(), 1e-4), {}, "log-probs near -1e5, finite"


@case("scale_softcap", "cap * tanh(x / cap)", "apple/ml-cross-entropy#48", group="scale")
def _():
    def fn(h, w, t, cap):
        return pick((cap * torch.tanh(F.linear(h, w) / cap)).log_softmax(-1), t)

    return fn, (*head(scale=8.0), 5.0), {}, "|logit| up to ~100 against cap 5, so ignoring it is obvious"


@case("scale_logit_multiplier", "multiply by a config scale", "unslothai/unsloth#11277", group="scale")
def _():
    def fn(h, w, t, s):
        return pick((F.linear(h, w) * s).log_softmax(-1), t)

    return fn, (*head(), 0.0625), {}, "scale applied"
