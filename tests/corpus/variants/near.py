"""Near misses: the full logits, or more than log-probability and entropy, are needed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.corpus.variants.inputs import f_btv, f_distill, f_ids, f_nv
from tests.corpus.variants.registry import variant


@variant(
    "NEG01", "neg", ["TRL SFT accuracy", "xtuner returns logits", "HF output.logits"], f_btv, returns="(logp, logits)"
)
def neg01_logits_escape(hidden, weight, labels):
    """logits are also a graph output, so they must be materialised."""
    lg = F.linear(hidden, weight).float()
    return lg.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1), lg


@variant(
    "NEG02",
    "neg",
    ["ms-swift rlhf mixin (mean logits)", "TRL CPO/ORPO metrics", "TRL mean_logits"],
    f_btv,
    returns="(logp, mean_logits)",
)
def neg02_mean_logits_metric(hidden, weight, labels):
    """per-row mean of the logits as an extra consumer (streamable, but only if the pass knows the reduction)."""
    lg = F.linear(hidden, weight)
    return lg.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1), lg.detach().mean(-1)


@variant("NEG03", "neg", ["TRL SFT mean token accuracy"], f_btv, returns="(logp, is_top1)")
def neg03_argmax_accuracy(hidden, weight, labels):
    """argmax == label as an extra consumer."""
    lg = F.linear(hidden, weight).float()
    return lg.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1), (lg.argmax(-1) == labels)


@variant("NEG04", "neg", ["pretraining stacks"], f_nv, returns="scalar")
def neg04_label_smoothing(hidden, weight, labels):
    """F.cross_entropy(label_smoothing=0.1, reduction='none').sum()."""
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none", label_smoothing=0.1).sum()


@variant("NEG06", "neg", ["TRL GKD/GOLD", "Liger JSD", "verl/NeMo-RL distillation"], f_distill, returns="scalar")
def neg06_generalized_jsd(hidden, weight, ref_hidden, ref_weight, mask, beta=0.5):
    """JSD between student and teacher full distributions (mixture by logsumexp of stacked log-probs)."""
    q = F.log_softmax(F.linear(hidden, weight).float(), -1)
    p = F.log_softmax(F.linear(ref_hidden, ref_weight).float(), -1)
    mix = torch.logsumexp(torch.stack([q + math.log(1 - beta), p + math.log(beta)]), dim=0)
    j = beta * F.kl_div(mix, p, reduction="none", log_target=True) + (1 - beta) * F.kl_div(
        mix, q, reduction="none", log_target=True
    )
    return (j.sum(-1) * mask).sum() / mask.sum()


@variant("NEG08", "neg", ["tied embeddings models"], f_ids, synthetic=True, returns="scalar")
def neg08_tied_embedding_weight(hidden, weight, input_ids):
    """weight is also used as the input embedding: its gradient has two contributions."""
    h = hidden + F.embedding(input_ids, weight)
    lg = F.linear(h, weight).float()[:, :-1]
    return -lg.log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1).mean()


@variant("NEG09", "neg", ["LoRA on lm_head / value-head models"], f_btv, synthetic=True, returns="(logp, value)")
def neg09_hidden_has_second_consumer(hidden, weight, labels):
    """hidden feeds a value head too (PPO actor-critic with shared trunk)."""
    lg = F.linear(hidden, weight).float()
    return lg.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1), hidden.float().tanh().mean(-1)
