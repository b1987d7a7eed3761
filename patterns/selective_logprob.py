"""Log-probs of given labels: log_softmax or logsumexp, then gather, an advanced index or cross_entropy.

All that it reduces over the vocabulary is a maximum and a sum of exponentials, in one of two spellings that torch's own
decompositions use; the label's logit is picked on the way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo.pattern import NearMiss, Pattern, Spelling
from inductor_grpo.patterns import naive


def softmax_denominator(z: Tensor) -> Tensor:
    """Of softmax and log_softmax."""
    return (z - z.amax(1, keepdim=True)).exp().sum(1, keepdim=True)


def logsumexp_sum(z: Tensor, zero: Tensor) -> Tensor:
    """Of logsumexp, which leaves the logits of an infinite maximum as they are."""
    m = z.amax(1, keepdim=True)
    return (z - torch.where(m.abs() == torch.inf, zero, m)).exp().sum(1, keepdim=True)


def over_rows(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Normalised over the tokens."""
    return naive.pick(F.linear(hidden, weight).float().log_softmax(0), labels)


def squared(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A sum of squares is no softmax."""
    z = F.linear(hidden, weight).float()
    return naive.pick(z, labels) - (z - z.amax(-1, keepdim=True)).square().sum(-1).log()


PATTERN = Pattern(
    name="selective_logprob",
    summary="log-probs of given labels in one online pass over the vocabulary",
    examples=(
        naive.log_softmax_gather,
        naive.gather_minus_logsumexp,
        naive.negative_cross_entropy,
        naive.advanced_index,
        naive.with_temperature,
    ),
    near_misses=(
        NearMiss(function=over_rows, why="it normalises over tokens, not over the vocabulary"),
        NearMiss(function=squared, why="it sums squares, not exponentials"),
    ),
    spellings=(
        # A softmax of an infinite maximum is nan in every column; the online sum is not.
        Spelling(value=softmax_denominator, online=lambda m, s, t: torch.where(m.isinf(), torch.nan, s)),
        Spelling(value=logsumexp_sum, online=lambda m, s, t: s),
    ),
    hints=("gather the label's log-prob before anything else reads the logits",),
)
