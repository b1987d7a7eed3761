"""Log-probs together with the entropy of the same softmax, in the spellings that trainers use.

With ``d = z - m``: the entropy is ``log(s) - t / s`` for ``s = sum(exp(d))``, ``t = sum(exp(d) * d)``.  Only its
forward is one pass: the gradient of an entropy sums over the vocabulary before it can be written, so the backward stays
with the engine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo.pattern import NearMiss, Pattern, Spelling
from inductor_grpo.patterns import naive


def sum_p_logp(z: Tensor) -> Tensor:
    """``(logp.exp() * logp).sum(-1)``."""
    logp = z.log_softmax(1)
    return (logp.exp() * logp).sum(1, keepdim=True)


def sum_softmax_logp(z: Tensor) -> Tensor:
    """``(softmax * log_softmax).sum(-1)``."""
    return (z.softmax(1) * z.log_softmax(1)).sum(1, keepdim=True)


def mean_logit(z: Tensor) -> Tensor:
    """``(softmax * logits).sum(-1)``."""
    return (z.softmax(1) * z).sum(1, keepdim=True)


def negative_entropy(m: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """From the statistics; nan where the softmax is."""
    return torch.where(m.isinf(), torch.nan, t / s - s.log())


def of_another_softmax(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A cross entropy between two temperatures is no entropy."""
    z = F.linear(hidden, weight).float()
    return naive.pick(z.log_softmax(-1), labels) - (z.softmax(-1) * (z / 2).log_softmax(-1)).sum(-1)


PATTERN = Pattern(
    name="logprob_entropy",
    summary="log-probs and entropy in one online pass over the vocabulary",
    examples=(naive.entropy_of_log_softmax, naive.entropy_of_softmax, naive.entropy_of_both),
    near_misses=(NearMiss(function=of_another_softmax, why="two temperatures: a cross entropy, not an entropy"),),
    spellings=(
        Spelling(value=sum_p_logp, online=negative_entropy),
        Spelling(value=sum_softmax_logp, online=negative_entropy),
        Spelling(value=mean_logit, online=lambda m, s, t: torch.where(m.isinf(), torch.nan, m + t / s)),
    ),
    weighted=True,
    hints=("compute the entropy from the log-softmax or softmax of the same logits",),
)
