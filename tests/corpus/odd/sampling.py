"""Samplers, truncated distributions and penalties, with the loss of what they choose."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, also, case, head, log_prob, pick
from tests.corpus.spellings import normal


def uniform(*shape):
    return lambda: torch.rand(*shape, generator=torch.Generator().manual_seed(6))


@case("streamed")
def nucleus(h, w, y):
    z = h @ w.t()
    ordered, order = z.sort(-1, descending=True)
    p = ordered.softmax(-1)
    dropped = torch.zeros_like(z, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p > 0.9)
    return log_prob(z.masked_fill(dropped, -1e9), y)


@case("streamed")
def top_k_by_threshold(h, w, y):
    z = h @ w.t()
    return log_prob(z.masked_fill(z < z.topk(30, -1).values[:, -1:], -1e9), y)


@case("streamed")
def top_k_scattered_back(h, w, y):
    z = h @ w.t()
    values, indices = z.topk(8, -1)
    kept = torch.full_like(z, -1e9).scatter(1, indices, values)
    return log_prob(kept, y), values.log_softmax(-1)[:, 0]


@case("streamed", also(uniform(N, V)))
def gumbel_maximum(h, w, y, u):
    z = h @ w.t()
    chosen = (z - (-u.log()).log()).argmax(-1)
    return log_prob(z, chosen), chosen


@case("streamed", also(uniform(N, V)))
def gumbel_straight_through_into_the_embedding(h, w, y, u):
    p = ((h @ w.t() - (-u.log()).log()) / 0.7).softmax(-1)
    return (F.one_hot(p.argmax(-1), V).float() + p - p.detach()) @ w


@case("NO_ROW_RULE", also(uniform(N)))
def inverse_distribution_by_searchsorted(h, w, y, u):
    p = (h @ w.t()).softmax(-1)
    chosen = torch.searchsorted(p.cumsum(-1).detach(), u[:, None]).clamp(max=V - 1)
    return p.gather(1, chosen).log()


@case("streamed", also(uniform(N)))
def inverse_distribution_by_counting(h, w, y, u):
    p = (h @ w.t()).softmax(-1)
    chosen = (p.cumsum(-1).detach() < u[:, None]).sum(-1)
    return pick(p.log(), chosen.clamp(max=V - 1))


@case("streamed")
def repetition_penalty(h, w, y):
    z = h @ w.t()
    seen = torch.stack([y.roll(1), y.roll(2)], 1)
    score = z.gather(1, seen)
    return log_prob(z.scatter(1, seen, torch.where(score < 0, score * 1.2, score / 1.2)), y)


@case("NO_ROW_RULE", also(lambda: normal(V, V, seed=8, grad=True)))
def bigram_prior_by_embedding(h, w, y, prior):
    return log_prob(h @ w.t() + F.embedding(y.roll(1), prior), y)


@case("MIXES_ROWS", also(lambda: normal(V, V, seed=8)))
def bigram_prior_that_is_fixed(h, w, y, prior):
    return log_prob(h @ w.t() + prior[y.roll(1)], y)


@case("MIXES_ROWS", head(7, 16, 41, lambda: normal(2, V, seed=5, grad=True), batch=2))
def bias_per_sequence_that_learns(h, w, y, bias):
    return log_prob(h @ w.t() + bias[:, None], y)


@case("streamed", head(7, 16, 41, lambda: normal(2, V, seed=5), batch=2))
def bias_per_sequence_that_is_fixed(h, w, y, bias):
    return log_prob(h @ w.t() + bias[:, None], y)


@case("streamed")
def expected_embedding_of_the_tied_head(h, w, y):
    return (h @ w.t()).softmax(-1) @ w


@case("streamed")
def expected_embedding_into_the_head_again(h, w, y):
    return log_prob((h @ w.t()).softmax(-1) @ w @ w.t(), y)


@case("streamed", also(lambda: normal(V, 8, seed=5, grad=True)), whole=True)
def expected_value_over_the_vocabulary(h, w, y, values):
    z = h @ w.t()
    return (z.softmax(-1) * values.sum(1)).sum(-1), log_prob(z, y)
