"""Reductions, scans, sorts and pads over the tokens instead of the vocabulary, alone and next to the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, also, case, head, log_prob, pick, register

BACKWARDS = torch.arange(N - 1, -1, -1)

# name -> (the operation over the rows of [N, V], outcome beside the logits, outcome by itself and without gradients)
OVER_ROWS = {
    "cumsum": (lambda z: z.cumsum(0), "MIXES_ROWS", "MIXES_ROWS"),
    "cumprod": (lambda z: z.cumprod(0), "MIXES_ROWS", "MIXES_ROWS"),
    "sort": (lambda z: z.sort(0).values, "MIXES_ROWS", ""),
    "argsort": (lambda z: z.argsort(0), "MIXES_ROWS", ""),
    "topk": (lambda z: z.topk(N, 0).values, "MIXES_ROWS", "NO_ROW_RULE"),
    "softmax": (lambda z: z.softmax(0), "MIXES_ROWS", ""),
    "gather_in_sorted_order": (lambda z: torch.take_along_dim(z, z.argsort(0), 0), "MIXES_ROWS", ""),
    "padded_difference": (lambda z: F.pad(z.diff(dim=0), (0, 0, 0, 1)), "MIXES_ROWS", ""),
    "shift_by_padding": (lambda z: F.pad(z, (0, 0, 2, 0))[:-2], "MIXES_ROWS", ""),
    "average_pool": (lambda z: F.avg_pool1d(z.t()[None], 3, 1, 1)[0].t(), "NO_ROW_RULE", ""),
    "rotation": (lambda z: torch.rot90(z, 2), "MIXES_ROWS", ""),
    "previous_row": (lambda z: torch.stack([z[max(0, i - 1)] for i in range(N)]), "LAYOUT", ""),
    "outer_product_of_means": (lambda z: z.mean(1, keepdim=True) * z.mean(0, keepdim=True), "MIXES_ROWS", ""),
    # These are sums, or moves of whole rows: the rows stay apart.
    "roll": (lambda z: z.roll(3, 0), "streamed", "streamed"),
    "reversed_by_index": (lambda z: z[BACKWARDS], "streamed", ""),
    "reversed_by_index_select": (lambda z: z.index_select(0, BACKWARDS), "streamed", ""),
    "unit_columns": (lambda z: F.normalize(z, dim=0), "streamed", ""),
    "row_norms_clipped": (lambda z: z.renorm(2, 0, 1.0), "streamed", ""),
    "sum_given_to_all": (lambda z: z.sum(0).expand(N, -1), "streamed", ""),
    "triangle": (lambda z: z.tril(), "streamed", ""),
}


def beside(over):
    def function(h, w, y):
        z = h @ w.t()
        return log_prob(z + over(z), y)

    return function


def alone(over):
    def function(h, w, y):
        with torch.no_grad():
            z = h @ w.t()
            return log_prob(z, y), over(z).logsumexp(-1)

    return function


for name, (over, together, apart) in OVER_ROWS.items():
    register(together, f"{name}_over_rows_beside_the_logits", beside(over))
    if apart:
        register(apart, f"{name}_over_rows_alone", alone(over))


@case("streamed", known="the sum is repeated for every token outside, and no report says so")
def sum_given_to_all_over_rows_alone(h, w, y):
    return alone(lambda z: z.sum(0).expand(N, -1))(h, w, y)


@case("MIXES_ROWS", head(batch=2))
def running_sum_over_time(h, w, y):
    z = h @ w.t()
    return log_prob(z + 0.1 * z.cumsum(1), y)


# ---------------------------------------------------------------- a batch, or a time, of one


@case("MIXES_ROWS", head(7, batch=1))
def centred_over_a_batch_of_one(h, w, y):
    z = h @ w.t()
    return log_prob(z - 0.5 * z.mean(0, keepdim=True), y)


@case("MIXES_ROWS", head(7, batch=1))
def sum_and_maximum_over_a_batch_of_one(h, w, y):
    z = h @ w.t()
    return log_prob(z.sum(0) + z.amax(0), y[0])


@case("MIXES_ROWS", head(7, batch=1))
def mixture_of_a_batch_of_one(h, w, y):
    return pick((h @ w.t()).log_softmax(-1).logsumexp(0), y[0])


@case("MIXES_ROWS", head(1, batch=4))
def maximum_over_a_time_of_one(h, w, y):
    z = h @ w.t()
    return log_prob(z - 0.5 * z.max(1, keepdim=True).values, y)


@case("MIXES_ROWS", head(1, batch=4))
def deviation_over_a_time_of_one(h, w, y):
    z = h @ w.t()
    return log_prob(z / (z.std(1, keepdim=True, correction=0) + 1), y)


@case("MIXES_ROWS", head(1, batch=3))
def sum_over_a_time_of_one(h, w, y):
    z = h @ w.t()
    return log_prob(z.sum(1, keepdim=True) + 0 * z, y)


# ---------------------------------------------------------------- a sequence's or an ensemble's own distribution


@case("MIXES_ROWS", head(7, batch=3))
def ensemble_of_mean_logits(h, w, y):
    return log_prob((h @ w.t()).mean(0), y[0])


@case("MIXES_ROWS", head(7, batch=3))
def ensemble_of_mean_probabilities(h, w, y):
    return pick((h @ w.t()).softmax(-1).mean(0).log(), y[0])


@case("MIXES_ROWS", head(7, batch=3))
def mutual_information_of_an_ensemble(h, w, y):
    p = (h @ w.t()).softmax(-1)
    mean = p.mean(0)
    return -(mean * mean.log()).sum(-1) + (p * p.log()).sum(-1).mean(0)


@case("MIXES_ROWS", head(7, batch=3))
def detached_ensemble_mean_subtracted(h, w, y):
    z = h @ w.t()
    return log_prob(z - z.mean(0, keepdim=True).detach(), y)


@case("MIXES_ROWS", head(7, batch=2))
def head_of_the_mean_hidden_subtracted(h, w, y):
    return log_prob(h @ w.t() - h.mean(1, keepdim=True) @ w.t(), y)


@case("streamed", head(1, batch=3))
def head_of_the_mean_hidden_of_a_time_of_one(h, w, y):
    return log_prob(h @ w.t() - 0.3 * h.mean(1, keepdim=True) @ w.t(), y)


@case("MIXES_ROWS", also(lambda: torch.randn(N, V, generator=torch.Generator().manual_seed(4))))
def mask_from_a_running_sum_of_an_input(h, w, y, scores):
    return log_prob((h @ w.t()).masked_fill(scores.cumsum(0) > 3, -1e9), y)
