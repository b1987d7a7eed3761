"""Sums per segment in packed batches: GSPO's sequence-level ratio and its relatives, as people write them.

All of them take ``new``, ``old`` and ``adv`` ``[N]``, segment ``ids`` ``[N]`` and the number of segments, and differ in
how they sum and how they come back to the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(ratio: Tensor, adv: Tensor, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """The clipped objective, with GSPO's bounds."""
    return -torch.min(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)


def weighted_by_label_count(
    new: Tensor, mask: Tensor, adv: Tensor, old: Tensor, ids: Tensor, num_segments: int, labels: Tensor, divisor: float
) -> tuple[Tensor, Tensor]:
    """Two aggregations with the same ids and weights, the clipped loss on tokens, and a metric.

    ``mask`` ``[N]`` bool, ``labels`` ``[N]``: the number of labels in each token's segment; returns the loss and the
    mean of the new log-probs over segments, both 0-dim.
    """
    log_ratio = new - old
    weight = mask.to(log_ratio.dtype) / labels.clamp(min=1)
    mean_ratio = log_ratio.new_zeros(num_segments).index_add_(0, ids, log_ratio * weight)
    mean_adv = log_ratio.new_zeros(num_segments).index_add_(0, ids, adv * weight)
    losses = clipped(mean_ratio.exp()[ids], mean_adv.detach()[ids]) * mask.to(new.dtype)
    return losses.sum() / divisor, (new * mask / labels.clamp(min=1)).sum().detach()


def mean_by_index_add(new: Tensor, old: Tensor, adv: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Sums and counts in two buffers."""
    total = new.new_zeros(num_segments).index_add_(0, ids, new - old)
    tokens = new.new_zeros(num_segments).index_add_(0, ids, torch.ones_like(new))
    return clipped((total / tokens.clamp(min=1)).exp()[ids], adv).mean()


def mean_by_scatter_reduce(new: Tensor, old: Tensor, adv: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """The mean in one call."""
    mean = new.new_zeros(num_segments).scatter_reduce(0, ids, new - old, "mean", include_self=False)
    return clipped(mean.exp()[ids], adv).mean()


def sum_by_one_hot(new: Tensor, old: Tensor, adv: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """A product with a matrix of tokens x segments, which is never made."""
    hot = (ids[:, None] == torch.arange(num_segments, device=ids.device)).to(new.dtype)
    return clipped(hot @ (hot.t() @ (new - old)).exp(), adv).mean()


def largest_by_scatter_reduce(new: Tensor, old: Tensor, adv: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Near miss: a maximum is no sum."""
    top = new.new_full((num_segments,), -10.0).scatter_reduce(0, ids, (new - old).detach(), "amax")
    return (top[ids] * new).mean()


def difference_of_prefix_sums(new: Tensor, old: Tensor, adv: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Near miss: nothing says that the boundaries ascend, and a descending pair would give a negative sum."""
    prefix = torch.nn.functional.pad(torch.cumsum(new - old, 0), (1, 0))
    return (prefix[cu_seqlens[1:]] - prefix[cu_seqlens[:-1]]).exp().mean() + (new * adv).mean()


EXAMPLES = (mean_by_index_add, mean_by_scatter_reduce, sum_by_one_hot)
NEAR_MISSES = (largest_by_scatter_reduce,)
HINTS = ("sum with index_add_ and ids, one a token; sorted ids give the same bits in every run",)
