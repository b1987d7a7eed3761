"""What is computed from all logits goes back into them, or is compared with them."""

from __future__ import annotations

import torch

from tests.corpus.odd.registry import case, head, log_prob, pick
from tests.corpus.spellings import normal


@case("streamed")
def scaled_by_the_mean_log_prob_twice(h, w, y):
    z = h @ w.t()
    first = log_prob(z, y).mean()
    second = log_prob(z * (1 + first), y).mean()
    return log_prob(z * (first + second), y)


@case("streamed")
def shifted_by_the_largest_logit_of_all(h, w, y):
    z = h @ w.t()
    return log_prob(z - z.max().detach(), y), z.mean(), z.square().mean().sqrt()


@case("MIXES_ROWS")
def deviation_of_all_logits(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), z.std()


@case("streamed")
def norm_of_all_logits(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), z.norm()


@case("streamed")
def any_logit_is_nan(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), z.isnan().any(), z.isfinite().all()


@case("streamed")
def loss_skipped_if_any_logit_is_nan(h, w, y):
    z = h @ w.t()
    return torch.where(z.isnan().any(), 0.0, log_prob(z, y).mean())


@case("LAYOUT", head(13, 8, 13))
def maximum_subtracted_along_the_wrong_axis_of_a_square(h, w, y):
    z = h @ w.t()
    return (z - z.max(1).values).logsumexp(1)


@case("MIXES_ROWS", head(13, 8, 13), whole=True)
def square_plus_its_transpose(h, w, y):
    z = h @ w.t()
    return log_prob(z + z.t(), y)


# ---------------------------------------------------------------- comparisons: the two sides must be the same logits


@case("streamed", lambda: (normal(2, 16, seed=5051, grad=True), normal(17, 16, seed=5052, scale=0.5, grad=True)))
def maximum_of_stacked_copies(h, w):
    z = h @ w.t()
    return torch.cat([z, z * 0.5], 0).amax(1)


@case("streamed", lambda: (normal(3, 7, 7, seed=1, grad=True), normal(37, 7, seed=2, grad=True)))
def maximum_of_transposed_logits(h, w):
    z = (h @ w.t()).transpose(0, 1)
    return z.amax(-1), (z @ torch.linspace(-1, 1, 37)[:, None])[..., 0]


@case("streamed")
def maximum_of_some_rows(h, w, y):
    return (h @ w.t())[3:6].amax(-1), log_prob(h @ w.t(), y)


@case("streamed", head(200, 64, 300, dtype=torch.bfloat16))
def maximum_of_many_rows_in_bf16(h, w, y):
    z = h @ w.t()
    return z[5:].amax(-1), z.float().logsumexp(-1)


@case("streamed")
def largest_probability_and_where_it_is(h, w, y):
    p = (h @ w.t()).softmax(-1)
    return 1 - p.amax(-1), (p * (p == p.amax(-1, keepdim=True))).sum(-1)


@case("streamed")
def fifth_largest_of_some_rows_as_threshold(h, w, y):
    z = h @ w.t()
    some = z[2:9]
    return some.masked_fill(some < some.topk(5, -1).values[:, -1:], -1e9).logsumexp(-1), z.logsumexp(-1)


@case("streamed")
def where_the_largest_logit_of_all_is(h, w, y):
    z = h @ w.t()
    return (z * (z == z.max())).sum(-1), z.logsumexp(-1)


@case("streamed")
def equal_after_a_shift_by_a_statistic(h, w, y):
    z = h @ w.t()
    largest = z.amax(-1)
    shift = largest.mean()
    return ((z + shift) == (largest + shift)[:, None]).sum(-1), (z >= largest[:, None]).sum(-1)


@case("streamed")
def one_hot_of_the_best_word(h, w, y):
    z = h @ w.t()
    return (z * torch.nn.functional.one_hot(z.argmax(-1), 41)).sum(-1), z.max()


@case("streamed")
def log_prob_of_the_best_of_the_top_five(h, w, y):
    z = h @ w.t()
    z = torch.where(z >= z.topk(5, -1).values[:, -1:].detach(), z, -torch.inf)
    return log_prob(z, z.argmax(-1)), z.logsumexp(-1)


@case("streamed")
def row_normalised_twice(h, w, y):
    log_probs = (h @ w.t()).log_softmax(-1)
    return pick((log_probs * 0.5).log_softmax(-1), y), log_probs.logsumexp(-1)
