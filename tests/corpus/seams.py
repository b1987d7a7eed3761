"""Spellings of the seam: sums per segment, the maths between them and the loss, and the way back to the tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

WITHOUT_SUMS = {
    **dict.fromkeys(["GSPO01", "GSPO02", "GSPO04", "GSPO07", "GSPO11", "GSPO24", "gspo_form_padded"], "padded [B, T]"),
    "GSPO10": "a list of slices",
    "GSPO25": "a loop with a graph break a sequence",
    "gspo_form_split_loop": "a list of slices",
    "GSPO21": "differences of a prefix sum",
}


def lengths_to_ids(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def packed_args(*lengths: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """new, old, advantages per token, ids, count."""
    ids = lengths_to_ids(*(lengths or (5, 3, 8)))
    g = torch.Generator().manual_seed(3)
    new = (torch.randn(len(ids), generator=g) * 0.3).to(dtype).requires_grad_()
    old = (torch.randn(len(ids), generator=g) * 0.3).to(dtype)
    return new, old, torch.randn(len(ids), generator=g).to(dtype), ids, len(lengths or (5, 3, 8))


def clipped(ratio: torch.Tensor, adv: torch.Tensor, low: float = 0.1, high: float = 0.2) -> torch.Tensor:
    return -torch.min(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)


def fast_llm(new, mask, adv, old, doc, num_segments, labels, divisor):
    """Two aggregations with the same ids, weights by the label count, the clipped loss on tokens, a metric."""
    log_ratio = (new - old).reshape(-1)
    weight = mask.reshape(-1).to(log_ratio.dtype) / labels.reshape(-1).to(log_ratio.dtype).clamp(min=1)
    mean_ratio = log_ratio.new_zeros(num_segments).index_add_(0, doc, log_ratio * weight)
    mean_adv = log_ratio.new_zeros(num_segments).index_add_(0, doc, adv.to(log_ratio.dtype) * weight)
    ratio, advantage = mean_ratio.exp()[doc], mean_adv.detach()[doc]
    losses = clipped(ratio, advantage, 3e-4, 4e-4) * mask.to(new.dtype)
    return losses.sum() / divisor, (new * mask / labels.clamp(min=1)).sum().detach()


def fast_llm_args(ids: torch.Tensor, count: int, seed: int = 0, divisor: float = 3.5) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    n = len(ids)
    new = (torch.randn(n, generator=g) * 0.3).requires_grad_()
    old, adv, mask = torch.randn(n, generator=g) * 0.3, torch.randn(n, generator=g), torch.rand(n, generator=g) > 0.2
    labels = torch.zeros(max(count, 1)).index_add_(0, ids.long(), mask.float())[ids.long()]
    return new, mask, adv, old, ids, count, labels, divisor


def index_add(new, old, adv, ids, n):
    total = new.new_zeros(n).index_add_(0, ids, new - old)
    tokens = new.new_zeros(n).index_add_(0, ids, torch.ones_like(new))
    return clipped((total / tokens.clamp(min=1)).exp(), torch.linspace(-1, 1, n, device=new.device)).mean()


def scatter_add(new, old, adv, ids, n):
    total = new.new_zeros(n).scatter_add_(0, ids, new - old)
    tokens = new.new_zeros(n).scatter_add_(0, ids, torch.ones_like(new))
    return clipped((total / tokens.clamp(min=1)).exp(), torch.linspace(-1, 1, n, device=new.device)).mean()


def index_put(new, old, adv, ids, n):
    total = new.new_zeros(n).index_put_((ids,), new - old, accumulate=True)
    tokens = new.new_zeros(n).index_put_((ids,), new.new_ones(()), accumulate=True)
    return clipped((total / tokens.clamp(min=1)).exp(), torch.linspace(-1, 1, n, device=new.device)).mean()


def scatter_reduce_sum(new, old, adv, ids, n):
    total = new.new_zeros(n).scatter_reduce(0, ids, new - old, "sum")
    return clipped(total.exp()[ids], adv).sum()


def scatter_reduce_mean_with_self(new, old, adv, ids, n):
    mean = torch.linspace(0, 0.1, n, device=new.device).scatter_reduce(0, ids, new - old, "mean", include_self=True)
    return clipped(mean.exp()[ids], adv).sum()


def scatter_reduce_mean_keeps_empty(new, old, adv, ids, n):
    mean = torch.linspace(0, 0.1, n + 2, device=new.device).scatter_reduce(
        0, ids, (new - old).detach(), "mean", include_self=False
    )
    return (mean[ids] * new).sum(), mean


def into_a_buffer(new, old, adv, ids, n):
    start = torch.linspace(-0.1, 0.1, n, device=new.device)
    return clipped(start.index_add(0, ids, new - old).exp()[ids], adv).sum()


def gather_back(new, old, adv, ids, n):
    total = new.new_zeros(n).scatter_add(0, ids, new - old)
    return clipped(total.exp().gather(0, ids), adv).mean()


def select_back(new, old, adv, ids, n):
    total = new.new_zeros(n).index_add(0, ids, new - old)
    return clipped(total.exp().index_select(0, ids), adv).mean()


def batched_tokens(new, old, adv, ids, n):
    """[B, T] tensors with ids [B, T] that count over the whole batch."""
    new, old, adv, ids = (x.reshape(2, -1) for x in (new, old, adv, ids))
    total = new.new_zeros(n).index_add_(0, ids.flatten(), (new - old).flatten())
    return (clipped(total.exp()[ids], adv) * (ids > 0)).sum(-1).mean()


def from_cu(new, old, adv, cu):
    ids = torch.bucketize(torch.arange(new.numel(), device=new.device), cu[1:], right=True)
    total = new.new_zeros(cu.numel() - 1).index_add_(0, ids, new - old)
    return clipped((total / (cu[1:] - cu[:-1])).exp()[ids], adv).sum() / new.numel()


def from_position_ids(new, old, adv, position_ids):
    ids = torch.cumsum(position_ids == 0, 0) - 1
    total = new.new_zeros(new.numel()).index_add_(0, ids, new - old)
    return clipped(total.exp()[ids], adv).sum()


def from_lengths(new, old, adv, lengths):
    ids = torch.repeat_interleave(torch.arange(lengths.numel(), device=new.device), lengths, output_size=new.numel())
    total = new.new_zeros(lengths.numel()).index_add_(0, ids, new - old)
    return clipped((total / lengths).exp()[ids], adv).sum()


def per_segment_outputs(new, old, adv, ids, n):
    """The sums are returned, with a gradient of their own."""
    total = new.new_zeros(n).index_add_(0, ids, new - old)
    return clipped(total.exp()[ids], adv).sum(), total, total.exp().sum().detach(), (total.exp() > 1.1).float().mean()


def token_form(new, old, adv, ids, n):
    mean = new.new_zeros(n).index_add_(0, ids, new - old).detach()[ids]
    return clipped((mean + new - new.detach()).exp(), adv).mean()


def two_losses(new, old, adv, ids, n):
    """Two scalars with a gradient: no single factor to take out."""
    total = new.new_zeros(n).index_add_(0, ids, new - old)
    ratio = total.exp()[ids]
    return clipped(ratio, adv).sum(), (ratio * adv).mean()


def sums_of_sums(new, old, adv, ids, n):
    """A second aggregation that needs the first."""
    mean = new.new_zeros(n).index_add_(0, ids, new - old)[ids]
    spread = new.new_zeros(n).index_add_(0, ids, (new - old - mean) ** 2)
    return clipped((spread + 1).log()[ids], adv).sum()


def two_sets_of_ids(new, old, adv, ids, n):
    """Turns within documents."""
    turns = torch.arange(new.numel(), device=new.device) // 2
    by_turn = new.new_zeros(8).index_add_(0, turns, new - old)
    by_document = new.new_zeros(n).index_add_(0, ids, new - old)
    return (clipped(by_turn.exp()[turns], adv) + clipped(by_document.exp()[ids], adv)).sum()


def all_metrics(new, old, adv, ids, n):
    total = new.new_zeros(n).index_add_(0, ids, new - old)
    ratio = total.exp()[ids]
    outside = ((ratio < 0.9) | (ratio > 1.2)).float()
    kl = torch.expm1(old - new.detach()) - (old - new.detach())
    loss = clipped(ratio, adv).sum()
    return loss, ratio.sum().detach(), outside.mean().detach(), kl.mean(), new.mean().detach(), ratio.max().detach()


def divided_by_the_mask(new, old, adv, ids, n):
    mask = (adv > -0.5).float()
    total = new.new_zeros(n).index_add_(0, ids, (new - old) * mask)
    tokens = new.new_zeros(n).index_add_(0, ids, mask).clamp(min=1)
    return (clipped((total / tokens).exp()[ids], adv) * mask).sum() / mask.sum()


def a_value_per_document(new, old, adv, ids, n):
    """The table of advantages is longer than the count."""
    per_document = torch.linspace(-1, 1, n + 3, device=new.device)
    total = new.new_zeros(n).index_add_(0, ids, new - old)
    return clipped(total.exp()[ids], per_document[ids]).sum()


def float64(new, old, adv, ids, n):
    total = new.new_zeros(n, dtype=torch.float64).index_add_(0, ids, (new - old).double())
    return clipped(total.exp().float()[ids], adv).sum()


def divided_by_nothing(new, old, adv, ids, n):
    """Everything is masked, and the loss divided by zero: the gradient of a document without tokens stays zero."""
    per_document = new[: n + 1] * 1
    total = new.new_zeros(n + 1).index_add_(0, ids, new - old)
    return (clipped((total + per_document).exp()[ids], adv)).sum() / (adv > 100).sum()


def integer_counts(new, old, adv, ids, n):
    mask = adv > 0
    tokens = new.new_zeros(n, dtype=torch.int32).index_add_(0, ids, mask.int())
    total = new.new_zeros(n).index_add_(0, ids, torch.where(mask, new - old, 0.0))
    return clipped((total / tokens.clamp(min=1)).exp()[ids], adv).sum(), tokens


def stacked(new, old, adv, ids, n):
    """Two quantities in one aggregation of rows."""
    both = new.new_zeros(n, 2).index_add_(0, ids, torch.stack([new - old, adv], dim=1))
    return clipped(both[:, 0].exp()[ids], both[:, 1].detach()[ids]).sum()


def one_hot(new, old, adv, ids, n):
    hot = F.one_hot(ids, n).to(new.dtype)
    mean = (hot.t() @ (new - old)) / hot.sum(0).clamp(min=1)
    return clipped(hot @ mean.exp(), adv).sum()


def comparison(new, old, adv, ids, n):
    """One-hot by a comparison: an id outside of the range takes part in nothing."""
    hot = (ids[:, None] == torch.arange(n - 1, device=new.device)).to(new.dtype)
    mean = ((new - old)[:, None] * hot).sum(0) / hot.sum(0).clamp(min=1)
    return clipped((hot * mean.exp()).sum(1), adv).sum()


def longer_table_from_the_end(new, old, adv, ids, n):
    """Negative ids count from the end of each tensor, and the table has another end than the sums."""
    ids = torch.where(adv > 0, ids, ids - n)
    total = new.new_zeros(n).index_put((ids,), new - old, accumulate=True)
    return clipped(total.exp()[ids], torch.linspace(-1, 1, n + 3, device=new.device)[ids]).sum()


def one_hot_counts(new, old, adv, ids, n):
    """A product of int64 and bool counts; a product with int32 is int64."""
    hot = F.one_hot(ids, 6)
    tokens = (hot * (adv > 0)[:, None]).sum(0)
    return (tokens[ids] * new).sum(), tokens, (hot * (adv * 5).int()[:, None]).sum(0)


def one_hot_wider(new, old, adv, ids, n):
    hot = F.one_hot(ids, 6).double()
    total = (hot * (new - old)[:, None]).sum(0)
    return total, clipped((hot * total.exp()).sum(1), adv).sum()


class TwiceTheGradient(torch.autograd.Function):
    """``table[ids]``; half precision keeps ``index_add`` and its factor in the backward."""

    @staticmethod
    def forward(ctx, table, ids):
        ctx.save_for_backward(ids)
        ctx.count = len(table)
        return table[ids]

    @staticmethod
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.count).index_add(0, ids, gradient, alpha=2), None


def factor_in_the_backward(new, old, adv, ids, n):
    total = new.new_zeros(n).index_add(0, ids, new - old)
    return (TwiceTheGradient.apply(total.exp(), ids) * adv).sum()


def sums_of_a_dtype(new, old, adv, ids, n):
    """Totals that are told in what they add up."""
    total = new.new_zeros(n).index_add(0, ids, new - old)
    ratio = total.exp()[ids]
    return (ratio * adv).sum(dtype=torch.float64), (ratio.detach() * 3).sum(dtype=torch.int64)


def large_constants(new, old, adv, ids, n):
    """Integers that fp32 does not hold, and one element that widens what it meets."""
    values = (adv * 10).long() * torch.full_like(ids, 16777217) + 123456789123
    total = ids.new_zeros(n).index_add(0, ids, values)
    wide = ids.new_zeros(n).index_add(0, ids, (adv * 9).int() * torch.full((1,), 3_000_000_000, device=new.device))
    return (total[ids] * new * 1e-9).sum(), total, values.sum(), (wide[ids] + total[ids]).sum()


def input_written_at_the_end(new, old, adv, ids, n):
    """The terms read what the input held before; ``new`` has no gradient here."""
    weight = old * 2 + 1
    total = new.new_zeros(n).index_add(0, ids, (new - old).detach() * weight)
    loss = clipped(total.exp()[ids], weight).sum()
    old.mul_(3).add_(1)
    return loss, old + 0


def complex_values(new, old, adv, ids, n):
    values = torch.complex(new - old, adv)
    total = torch.zeros(n, dtype=values.dtype, device=new.device).index_put((ids,), values, accumulate=True)
    return torch.view_as_real(total).sum(-1)


def amax(new, old, adv, ids, n):
    top = new.new_full((n,), -10.0).scatter_reduce(0, ids, (new - old).detach(), "amax")
    return (top[ids] * new).sum()


def overwrite(new, old, adv, ids, n):
    last = new.new_zeros(n).index_put((torch.arange(n, device=new.device),), (new - old)[:n].detach())
    return (last[ids] * new).sum()


def embedding(new, old, adv, ids, n):
    table = new[:8].reshape(n - 1, -1)
    return (F.embedding(ids.clamp(max=n - 2), table).sum(-1) * adv).sum()


def _packed(function: Any, expected: tuple[int, int]) -> Any:
    return lambda: (function, packed_args(), expected)


def _lengths(dtype: torch.dtype = torch.int64) -> Any:
    return lambda: (from_lengths, (*packed_args()[:3], torch.tensor([5, 3, 8], dtype=dtype)), (2, 2))


# name -> (function, arguments, (calls, sums per segment)), forward and backward together
SPELLINGS: dict[str, Any] = {
    "fast_llm": lambda: (fast_llm, fast_llm_args(lengths_to_ids(5, 3, 8), 3), (2, 3)),
    "fast_llm_unsorted": lambda: (fast_llm, fast_llm_args(torch.tensor([2, 0, 1, 2, 0, 0, 1]), 4), (2, 3)),
    "fast_llm_empty_segments": lambda: (fast_llm, fast_llm_args(lengths_to_ids(0, 5, 0, 0, 3, 0), 6), (2, 3)),
    "fast_llm_no_tokens": lambda: (fast_llm, fast_llm_args(lengths_to_ids(0, 0), 2), (2, 3)),
    "fast_llm_nothing": lambda: (fast_llm, fast_llm_args(lengths_to_ids(0), 0), (2, 3)),
    "fast_llm_one_token": lambda: (fast_llm, fast_llm_args(lengths_to_ids(1), 1), (2, 3)),
    "index_add": _packed(index_add, (1, 2)),
    "scatter_add": _packed(scatter_add, (1, 2)),
    "index_put": _packed(index_put, (1, 2)),
    "scatter_reduce_sum": _packed(scatter_reduce_sum, (2, 2)),
    "scatter_reduce_mean_with_self": _packed(scatter_reduce_mean_with_self, (2, 4)),
    "scatter_reduce_mean_keeps_empty": _packed(scatter_reduce_mean_keeps_empty, (1, 2)),
    "into_a_buffer": _packed(into_a_buffer, (2, 2)),
    "gather_back": _packed(gather_back, (2, 2)),
    "select_back": _packed(select_back, (2, 2)),
    "batched_tokens": _packed(batched_tokens, (2, 2)),
    "cu_seqlens": lambda: (from_cu, (*packed_args()[:3], torch.tensor([0, 5, 8, 16])), (2, 2)),
    "cu_seqlens_int32": lambda: (from_cu, (*packed_args()[:3], torch.tensor([0, 5, 8, 16], dtype=torch.int32)), (2, 2)),
    "lengths": _lengths(),
    "position_ids": lambda: (from_position_ids, (*packed_args()[:3], _positions(5, 3, 8)), (2, 2)),
    "per_segment_outputs": _packed(per_segment_outputs, (2, 2)),
    "token_form": _packed(token_form, (1, 1)),
    "two_losses": _packed(two_losses, (2, 2)),
    "sums_of_sums": _packed(sums_of_sums, (4, 4)),
    "two_sets_of_ids": _packed(two_sets_of_ids, (4, 4)),
    "all_metrics": _packed(all_metrics, (2, 2)),
    "divided_by_the_mask": _packed(divided_by_the_mask, (2, 3)),
    "a_value_per_document": _packed(a_value_per_document, (2, 2)),
    "divided_by_nothing": _packed(divided_by_nothing, (2, 2)),
    "float64": _packed(float64, (2, 2)),
    "integer_counts": _packed(integer_counts, (2, 3)),
    "stacked": _packed(stacked, (2, 3)),
    "one_hot": _packed(one_hot, (2, 5)),  # one of them counts values that are not finite
    "comparison": _packed(comparison, (2, 5)),
    "longer_table_from_the_end": _packed(longer_table_from_the_end, (2, 2)),
    "one_hot_counts": _packed(one_hot_counts, (1, 2)),
    "one_hot_wider": _packed(one_hot_wider, (2, 4)),
    "factor_in_the_backward": lambda: (factor_in_the_backward, packed_args(dtype=torch.bfloat16), (1, 2)),
    "sums_of_a_dtype": _packed(sums_of_a_dtype, (1, 2)),
    "large_constants": _packed(large_constants, (1, 2)),
    "input_written_at_the_end": _packed(input_written_at_the_end, (1, 1)),
}

BREAKS_WHEN_DYNAMIC = ("one_hot",)
"""Dynamo itself cannot trace a symbolic number of classes."""

CALLS_WHEN_FUSED = {
    "fast_llm_one_token": 3,  # one element is a scalar, of a static size: no factor is taken out
    "scatter_reduce_mean_keeps_empty": 2,  # a total after the sums
    "GSPO19": 2,
    "divided_by_nothing": 3,  # nothing is taken out of a sum that is returned
    "two_losses": 3,  # the backward's sum waits for two gradients
    "factor_in_the_backward": 2,
    "sums_of_a_dtype": 2,
    "large_constants": 2,
    "input_written_at_the_end": 2,
}
"""Where the totals take a call of their own."""

LEFT: dict[str, Any] = {
    name: lambda f=function: (f, packed_args())
    for name, function in {
        "amax": amax,
        "overwrite": overwrite,
        "embedding": embedding,
        "complex": complex_values,
    }.items()
}


def _positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])
