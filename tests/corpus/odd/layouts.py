"""Sizes of nothing and of one, squares, strides, and what is broadcast against the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, case, entropy, head, log_prob, register
from tests.corpus.spellings import ids, normal


def statistics(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), entropy(z), z.logsumexp(-1).square().sum(), z.amax(-1)


def shifted(h, w, y):
    z = F.linear(h, w)
    return log_prob(z[:, :-1], y[:, 1:]), z[..., 0] - z[..., -1], z.square().mean(-1).sum(-1)


# (tokens, features, vocabulary) -> outcome
SIZES = {
    (0, 16, 41): "streamed",
    (1, 16, 41): "streamed",
    (2, 16, 17): "streamed",
    (13, 0, 5): "streamed",
    (13, 1, 41): "streamed",
    (3, 2, 3): "streamed",
    (1, 40, 41): "streamed",
    (13, 1, 2): "NO_HEAD",
    (1, 1, 2): "MIXES_ROWS",
    (13, 16, 1): "NO_HEAD",
}
for sizes, outcome in SIZES.items():
    register(outcome, "sizes_" + "_".join(map(str, sizes)), statistics, head(*sizes), whole=0 in sizes or 1 in sizes)

BATCHED_SIZES = {
    (0, 7, 16, 41): "streamed",
    (1, 1, 16, 41): "streamed",
    (2, 1, 16, 17): "streamed",
    (2, 2, 2, 3): "streamed",
    (2, 13, 1, 41): "streamed",
}
for sizes, outcome in BATCHED_SIZES.items():
    name, (batch, *rest) = "batched_sizes_" + "_".join(map(str, sizes)), sizes
    register(outcome, name, shifted, head(*rest, batch=batch), whole=0 in sizes or 1 in sizes or 2 in sizes)


@case("nothing", lambda: (normal(16, seed=1, grad=True), *head()()[1:2], torch.tensor(7)))
def hidden_of_one_dimension(h, w, y):
    return (w @ h).log_softmax(-1)[y]


@case("streamed", head(1, 16, 41, lambda: normal(41, seed=5, grad=True)))
def one_row_with_biases_made_in_the_graph(h, w, y, bias):
    return log_prob(h @ w.t() - (w * w).sum(1) + bias.exp(), y)


@case("streamed", head(1))
def one_row_with_a_vocabulary_mask(h, w, y):
    return log_prob((h @ w.t()).masked_fill(torch.arange(41) >= 37, -1e9), y.clamp(max=36))


# ---------------------------------------------------------------- squares


@case("MIXES_ROWS", head(13, 8, 13))
def square_normalised_over_the_rows(h, w, y):
    return (h @ w.t()).log_softmax(0).gather(1, y[:, None])


@case("NO_ROW_RULE", head(13, 8, 13))
def square_transposed_with_its_diagonal(h, w, y):
    z = (h @ w.t()).t()
    return log_prob(z.t(), y), z.logsumexp(0) + z.diagonal()


@case("MIXES_ROWS", head(13, 8, 13))
def contrastive_of_both_directions(h, w, y):
    z = F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).t() * 5
    target = torch.arange(13)
    return (F.cross_entropy(z, target) + F.cross_entropy(z.t(), target)) / 2


@case("streamed", head(13, 8, 13), whole=True)
def contrastive_of_one_direction(h, w, y):
    return F.cross_entropy(h @ w.t(), torch.arange(13))


@case("LAYOUT", lambda: (normal(23, 8, seed=1, grad=True),))
def contrastive_of_a_batch_with_itself(h):
    z = (h @ h.t()).masked_fill(torch.eye(23, dtype=torch.bool), -1e9)
    return F.cross_entropy(z, (torch.arange(23) + 1) % 23)


# ---------------------------------------------------------------- strides


@case("streamed", lambda: (*head()()[:1], normal(1, 16, seed=2, grad=True).expand(V, 16), ids(N)), whole=True)
def weight_of_one_stretched_row(h, w, y):
    return log_prob(h @ w.t(), y)


@case(
    "streamed",
    lambda: (
        normal(26, 32, seed=1)[::2, ::2].detach().requires_grad_(),
        normal(16, V, seed=2).t().detach().requires_grad_(),
        ids(26)[::2],
    ),
)
def every_argument_strided(h, w, y):
    return log_prob(h @ w.t(), y)


def stretched_batch(h, w, y):
    return log_prob(torch.bmm(h, w.expand(2, 16, V)), y)


for name, shape in {"vocabulary": (1, V), "features": (16, 1)}.items():
    make = lambda shape=shape: (normal(2, N, 16, seed=1, grad=True), normal(*shape, seed=2, grad=True), ids(2, N))
    register("NO_HEAD", f"batched_product_of_a_weight_stretched_over_{name}", stretched_batch, make, whole=True)


@case("streamed", lambda: (normal(16, N, seed=1, grad=True), normal(16, V, seed=2, grad=True), ids(N)), whole=True)
def features_first_and_vocabulary_first(h, w, y):
    return log_prob(torch.einsum("hn,hv->vn", h, w).t(), y)


# ---------------------------------------------------------------- temperatures of every shape


def temperature(shape, grad):
    size = torch.Size(shape)
    return normal(size.numel(), seed=4, scale=0.3).reshape(size).requires_grad_(grad)


def by_temperature(h, w, y, t):
    z = h @ w.t() / t.exp()
    return z.logsumexp(-1), z.log_softmax(-1).reshape(-1, *y.shape, w.shape[0])[0].select(-1, 3)


# shape -> (outcome with a gradient, outcome without one)
TEMPERATURES = {
    (): ("streamed", "streamed"),
    (N, 1): ("streamed", ""),
    (V,): ("streamed", ""),
    (N, V): ("LOGITS_RETURNED", "streamed"),
    (1, 1, 1): ("MIXES_ROWS", ""),
    (2, 1, 1, V): ("MIXES_ROWS", ""),
}
BATCHED_TEMPERATURES = {
    (2, 1, 1): ("streamed", ""),
    (7, 1): ("streamed", ""),
    (1, 1, V): ("streamed", ""),
    (2, 1, V): ("MIXES_ROWS", "streamed"),
    (7, V): ("MIXES_ROWS", "streamed"),
    (2, 7, V): ("LOGITS_RETURNED", "streamed"),
}
for batch, tokens, table in ((None, N, TEMPERATURES), (2, 7, BATCHED_TEMPERATURES)):
    for shape, outcomes in table.items():
        for grad, outcome in zip((True, False), outcomes):
            if not outcome:
                continue
            name = "temperature_of_" + ("by".join(map(str, shape)) or "no_dimension")
            name += ("_of_a_batch" if batch else "") + ("_that_learns" if grad else "")
            more = lambda shape=shape, grad=grad: temperature(shape, grad)
            own = batch is not None and shape[-1] == V  # the temperature itself has a row for many words
            register(outcome, name, by_temperature, head(tokens, 16, V, more, batch=batch), whole=own)
