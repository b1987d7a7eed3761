"""What must hold where the vocabulary runs in tiles: columns, positions, masks that cover a tile, nan and inf."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, also, case, entropy, head, labelled, log_prob, pick, register, spoilt
from tests.corpus.spellings import normal

INF, NAN = float("inf"), float("nan")


@case("streamed")
def first_and_last_column_in_the_loss(h, w, y):
    z = h @ w.t()
    return (-log_prob(z, y) + z[:, 0].square() + z[:, -1]).mean()


@case("streamed")
def sum_of_the_first_columns(h, w, y):
    z = h @ w.t()
    return (-log_prob(z, y) + z[:, :3].sum(-1)).mean()


@case("NO_ROW_RULE")
def columns_by_index_with_a_duplicate(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), z[:, torch.tensor([0, 3, 3])].amax(-1), z[:, torch.tensor([1, 2])].sum(-1)


@case("streamed")
def vocabulary_rolled(h, w, y):
    return log_prob((h @ w.t()).roll(2, 1), y)


@case("streamed")
def vocabulary_rolled_and_counted(h, w, y):
    z = (h @ w.t()).roll(3, 1)
    return (z > 0).sum(-1), (z.tanh() * 3).logsumexp(-1), z.mean()


@case("MIXES_ROWS")
def positions_as_a_running_sum_of_ones(h, w, y):
    z = h @ w.t()
    return log_prob(z - 0.01 * torch.ones_like(z).cumsum(-1), y)


@case("streamed")
def words_after_the_label_by_a_running_sum(h, w, y):
    z = h @ w.t()
    return log_prob(z + torch.zeros_like(z).scatter(1, y[:, None], 1.0).cumsum(-1), y.roll(1))


@case("streamed")
def only_three_words_allowed(h, w, y):
    z = h @ w.t()
    allowed = torch.zeros_like(z).scatter(1, torch.stack([y, (y + 1) % V, (y + 7) % V], 1), 1.0)
    return log_prob(torch.where(allowed > 0, z, -1e9), y)


@case("streamed")
def vocabulary_cut_and_padded(h, w, y):
    return log_prob(F.pad((h @ w.t())[:, :30], (0, 11), value=-1e9), y.clamp(max=29))


@case("MIXES_ROWS")
def feature_padded_to_the_vocabulary(h, w, y):
    return log_prob(h @ w.t() + F.pad(h[:, :1], (3, 37)), y)


# ---------------------------------------------------------------- whole tiles masked


def entropy_of_products(z):
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


def entropy_as_a_difference(z):
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


def masked_entropy(h, w, y, measure, fill):
    z = (h @ w.t()).masked_fill(torch.arange(V) >= 20, fill)
    return log_prob(z, y.clamp(max=19)), measure(z)


def masked_entropy_by_addition(h, w, y, measure, fill):
    z = h @ w.t() + torch.where(torch.arange(V) >= 20, fill, 0.0)
    return log_prob(z, y.clamp(max=19)), measure(z)


def masked_entropy_by_where(h, w, y, measure, fill):
    bias = torch.where(torch.arange(V) >= 20, fill, 0.0)
    z = torch.where(bias < 0, bias, h @ w.t())
    return log_prob(z, y.clamp(max=19)), measure(z.detach())


LEAST = torch.finfo(torch.float32).min
MASKED = [
    (masked_entropy, entropy, LEAST),
    (masked_entropy, entropy, -INF),
    (masked_entropy, entropy_as_a_difference, -1e30),
    (masked_entropy_by_addition, entropy, LEAST),
    (masked_entropy_by_addition, entropy_of_products, -1e38),
    (masked_entropy_by_addition, entropy_as_a_difference, LEAST),
    (masked_entropy_by_where, entropy, LEAST),
    (masked_entropy_by_where, entropy_as_a_difference, -INF),
]
for masking, measure, fill in MASKED:
    name = f"{masking.__name__}_{measure.__name__.removeprefix('entropy_') or 'plain'}_filled_with_{fill:.0e}"
    register("streamed", name, functools.partial(masking, measure=measure, fill=fill))
    if masking is not masked_entropy_by_where and measure is entropy:
        function = torch.no_grad()(functools.partial(masking, measure=measure, fill=fill))
        register("streamed", name + "_without_gradients", function)


# ---------------------------------------------------------------- nan and inf


def everything(h, w, y, bias):
    z = h @ w.t() + bias
    return log_prob(z, y), entropy(z), z.logsumexp(-1), z.amax(-1), z.amin(-1)


def column(value):
    return lambda: normal(V, seed=9).index_fill(0, torch.tensor([5]), value)


for name, make in {
    "one_infinite_column": also(column(INF)),
    "one_column_of_nan": also(column(NAN)),
    "one_column_of_minus_infinity": also(column(-INF)),
    "no_finite_column": also(lambda: torch.full((V,), -INF)),
    "no_number_at_all": lambda: (torch.full((N, 16), NAN), *head()()[1:], torch.zeros(V)),
    "one_infinite_row": lambda: (
        normal(N, 16, seed=1).index_fill(0, torch.tensor([2]), INF),
        *head()()[1:],
        torch.zeros(V),
    ),
    "logits_of_ten_thousands": lambda: (normal(N, 16, seed=1, scale=1e4, grad=True), *head()()[1:], torch.zeros(V)),
}.items():
    register("streamed", name, everything, make)


# ---------------------------------------------------------------- several reductions in one walk


@case("streamed", labelled(spoilt(-100)))
def ignored_label_plain_and_smoothed(h, w, y):
    z = h @ w.t()
    return F.cross_entropy(z, y), F.cross_entropy(z, y, reduction="none", label_smoothing=0.1)


@case("streamed")
def cross_terms_of_two_temperatures(h, w, y):
    z = h @ w.t()
    return (
        pick((z / 2).log_softmax(-1), y),
        (z.softmax(-1) * (z / 2).log_softmax(-1)).sum(-1),
        (z.detach().softmax(-1) * z.log_softmax(-1)).sum(-1),
    )
