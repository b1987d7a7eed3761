"""Packed documents and the sequence-level ratio over them."""

from __future__ import annotations

import torch

from tests.corpus.faults.inputs import rand


def seg_ids(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def seg_mean(x, seg, n):
    total = torch.zeros(n, dtype=x.dtype).index_add_(0, seg, x)
    count = torch.zeros(n, dtype=x.dtype).index_add_(0, seg, torch.ones_like(x))
    return total / count.clamp(min=1)


def gspo(new, old, seg, adv, n, lo=0.2, hi=0.2):
    ratio = torch.exp(seg_mean(new - old, seg, n))
    return -torch.minimum(ratio * adv, ratio.clamp(1 - lo, 1 + hi) * adv).mean()


def gspo_args(*lengths, spread=0.3, dtype=torch.float32):
    n = sum(lengths)
    return (
        rand(n, seed=20, scale=spread, dtype=dtype, grad=True),
        rand(n, seed=21, scale=spread, dtype=dtype),
        seg_ids(*lengths),
        rand(len(lengths), seed=22, scale=1.0, dtype=dtype),
        len(lengths),
    )
