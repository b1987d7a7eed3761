"""The examples that patterns share: log-probs and entropies of hidden ``[..., H]``, weight ``[V, H]`` and labels
``[...]``, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pick(values: Tensor, labels: Tensor) -> Tensor:
    """The element of each label."""
    return values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def log_softmax_gather(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """log_softmax over everything, one element of it kept."""
    return pick(F.linear(hidden, weight).float().log_softmax(-1), labels)


def gather_minus_logsumexp(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The label's logit minus logsumexp."""
    logits = F.linear(hidden, weight).float()
    return pick(logits, labels) - logits.logsumexp(-1)


def negative_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """cross_entropy without reduction."""
    logits = F.linear(hidden, weight).float()
    return -F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


def advanced_index(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """log_softmax and an index for each row."""
    logp = (hidden @ weight.t()).float().log_softmax(-1).flatten(0, -2)
    return logp[torch.arange(logp.shape[0], device=logp.device), labels.flatten()].view(labels.shape)


def with_temperature(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Scaled and soft-capped logits."""
    logits = 30.0 * torch.tanh(F.linear(hidden, weight).float() / 30.0) / 0.7
    return pick(logits.log_softmax(-1), labels)


def entropy_of_log_softmax(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob, and minus the sum of p log p."""
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    return pick(logp, labels), -(logp.exp() * logp).sum(-1)


def entropy_of_softmax(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob, and logsumexp minus the mean logit under the softmax."""
    logits = F.linear(hidden, weight).float()
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return pick(logits.log_softmax(-1), labels), entropy


def entropy_of_both(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob, and the sum of softmax times log_softmax."""
    logits = F.linear(hidden, weight).float()
    logp = logits.log_softmax(-1)
    return pick(logp, labels), -(logits.softmax(-1) * logp).sum(-1)
