"""What looks like selective log-probability and is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.faults.inputs import head, pick, rand
from tests.corpus.faults.registry import case


@case(
    "near_softmax_dim0",
    "log_softmax over dim 0, square logits so shapes agree",
    "pytorch/pytorch#196468",
    group="near",
    must_not_fuse=True,
)
def _():
    def fn(hidden, weight, target):
        return pick(F.log_softmax(F.linear(hidden, weight), dim=0), target)

    return fn, head(n=12, v=12), {}, "dim=0 result, not dim=-1"


@case(
    "near_transposed_logits",
    "logits.t() before a last-dim softmax, square",
    "pytorch/pytorch#195320",
    group="near",
    must_not_fuse=True,
)
def _():
    def fn(hidden, weight, target):
        return pick(F.linear(hidden, weight).t().log_softmax(-1), target)

    return fn, head(n=12, v=12), {}, "softmax runs over tokens"


@case(
    "near_label_smoothing",
    "cross_entropy with label smoothing",
    "pytorch/pytorch#163774",
    group="near",
    must_not_fuse=True,
)
def _():
    def fn(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight), target, reduction="none", label_smoothing=0.1)

    return fn, head(), {}, "differs from -log p; needs the row mean of log p too"


@case(
    "near_class_weight",
    "cross_entropy with per-class weights",
    "linkedin/Liger-Kernel#338",
    group="near",
    must_not_fuse=True,
)
def _():
    def fn(hidden, weight, target, cw):
        return F.cross_entropy(F.linear(hidden, weight), target, weight=cw, reduction="mean")

    return fn, (*head(), torch.linspace(0.1, 2.0, 37)), {}, "mean divides by the sum of picked weights"


@case(
    "near_logits_bias_per_token",
    "a [N,V] additive term between head and softmax",
    "hill-a/stable-baselines#505",
    group="near",
)
def _():
    def fn(hidden, weight, target, extra):
        return pick((F.linear(hidden, weight) + extra).log_softmax(-1), target)

    return fn, (*head(), rand(13, 37, seed=9)), {}, "extra term applied; dropping it is the failure"


@case(
    "near_dropout_on_logits", "dropout(p=0) in training mode sits in the chain", "pytorch/pytorch#119760", group="near"
)
def _():
    def fn(hidden, weight, target):
        return pick(F.dropout(F.linear(hidden, weight), p=0.0, training=True).log_softmax(-1), target)

    return fn, head(), {}, "equal to eager"
