"""Input makers and the plain spelling that most cases vary."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rng(seed=0):
    g = torch.Generator()
    g.manual_seed(seed)
    return g


def rand(*shape, seed=0, scale=1.0, dtype=torch.float32, grad=False):
    t = (torch.randn(*shape, generator=rng(seed)) * scale).to(dtype)
    return t.requires_grad_(grad)


def ints(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=rng(seed))


def head(n=13, h=16, v=37, dtype=torch.float32, gh=True, gw=True, scale=0.5):
    """hidden [n,h], weight [v,h], target [n]."""
    return (
        rand(n, h, seed=10, dtype=dtype, grad=gh),
        rand(v, h, seed=11, scale=scale, dtype=dtype, grad=gw),
        ints(v, n, seed=12),
    )


def pick(logp, target):
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def naive(hidden, weight, target):
    """The pattern under test."""
    return pick(F.log_softmax(F.linear(hidden, weight), dim=-1), target)
