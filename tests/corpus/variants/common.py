"""What several losses share: the head with its log-probabilities, the clipped surrogate, masked means."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _lp(hidden, weight, labels):
    lg = F.linear(hidden, weight).float()
    return F.log_softmax(lg, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _pk(hidden, weight, labels):
    lg = (hidden @ weight.t()).float()
    return torch.gather(lg, -1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(lg, -1)


def _clip(r, a, lo=0.2, hi=0.2):
    return -torch.min(r * a, torch.clamp(r, 1 - lo, 1 + hi) * a)


def _seqmean(x, m):
    return ((x * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean()


def _mm(x, m):
    return (x * m).sum() / m.sum()
