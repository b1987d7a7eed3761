"""Heads told from layers: wide layers, attention, routers, and several heads at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, also, case, head, log_prob, pick
from tests.corpus.spellings import ids, normal


def learned(*shape, seed=5, scale=1.0):
    return lambda: normal(*shape, seed=seed, scale=scale, grad=True)


# ---------------------------------------------------------------- layers


@case("streamed", also(learned(64, 16), learned(16, 64, seed=6)), whole=True)
def layer_wider_than_the_vocabulary(h, w, y, up, down):
    return F.cross_entropy((h + F.gelu(h @ up.t()) @ down.t()) @ w.t(), y)


@case("streamed", also(learned(64, 16), learned(16, 64, seed=6)))
def layer_with_a_softmax(h, w, y, up, down):
    return F.cross_entropy((h + (h @ up.t()).softmax(-1) @ down.t()) @ w.t(), y)


@case("streamed", also(learned(64, 16), learned(16, 64, seed=6)))
def layer_with_a_norm(h, w, y, up, down):
    return F.cross_entropy((h + F.layer_norm(h @ up.t(), (64,)).relu() @ down.t()) @ w.t(), y)


@case("streamed", also(learned(64, 16), learned(V, 64, seed=6)), whole=True)
def hidden_wider_than_the_vocabulary(h, w, y, up, down):
    return F.cross_entropy(F.layer_norm(h @ up.t(), (64,)) @ down.t(), y)


@case("streamed", also(learned(32, 16), learned(V, 32, seed=6)), whole=True)
def head_behind_a_doubling_layer(h, w, y, up, down):
    return F.cross_entropy(F.silu(h @ up.t()) @ down.t(), y)


def masked(scores):
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e9).softmax(-1)


@case("streamed", head(30, 16, V, learned(12, 16)))
def attention_with_more_tokens_than_features(h, w, y, qkv):
    q, k, v = (h @ qkv.t()).chunk(3, -1)
    return F.cross_entropy((h + (masked(q @ k.t() / 2) @ v).repeat(1, 4)) @ w.t(), y)


@case("streamed", head(30, 16, V, learned(12, 16), batch=2))
def attention_by_the_library(h, w, y, qkv):
    q, k, v = (h @ qkv.t())[:, None].chunk(3, -1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
    return F.cross_entropy(((h + mixed.repeat(1, 1, 4)) @ w.t()).flatten(0, 1), y.flatten())


@case("streamed", also(learned(24, 16), learned(24, 16, 16, seed=7, scale=0.1)), whole=True)
def router_with_more_experts_than_features(h, w, y, router, experts):
    p, chosen = (h @ router.t()).softmax(-1).topk(2, -1)
    x = torch.einsum("nk,nkho,nh->no", p, experts[chosen], h)
    return F.cross_entropy((h + x) @ w.t(), y), (h @ router.t()).logsumexp(-1).square().mean()


@case("streamed MIXES_ROWS", also(learned(24, 16)))
def router_that_balances_its_load(h, w, y, router):
    p = (h @ router.t()).softmax(-1)
    load = F.one_hot(p.argmax(-1), 24).float().mean(0)
    return F.cross_entropy(h @ w.t(), y) + 0.24 * (p.mean(0) * load).sum()


# ---------------------------------------------------------------- products that look like heads


@case("streamed", head(30, 16, V, learned(2, 16), learned(V, 2, seed=6)), whole=True)
def update_merged_into_the_weight_with_more_tokens_than_features(h, w, y, down, up):
    return F.cross_entropy(h @ (w + up @ down).t(), y)


@case("streamed", head(grad=False))
def gradient_written_in_the_forward(h, w, y):
    logp = (h @ w.t()).log_softmax(-1)
    d = (logp.exp() - F.one_hot(y, V)) / y.numel()
    return -pick(logp, y).mean(), d @ w, d.t() @ h


# ---------------------------------------------------------------- several heads


@case("streamed", also(learned(30, 16)))
def heads_of_different_vocabularies(h, w, y, other):
    z = h @ other.t()
    return log_prob(h @ w.t(), y), z.logsumexp(-1) - z[:, 0]


@case("streamed", also(learned(30, 16)))
def heads_side_by_side(h, w, y, other):
    return log_prob(torch.cat([h @ w.t(), h @ other.t()], -1), y)


@case("streamed", also(learned(30, 16)))
def heads_added_on_the_words_that_both_have(h, w, y, other):
    z = h @ w.t()
    return log_prob(z[:, :30] + h @ other.t(), y.clamp(max=29)), z.logsumexp(-1)


@case("streamed", also(lambda: normal(N, 16, seed=5), lambda: normal(V, 16, seed=6)))
def divergence_from_a_frozen_head(h, w, y, other_h, other_w):
    a, b = (h @ w.t()).log_softmax(-1), (other_h @ other_w.t()).log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1), pick(a, y)


@case("NO_HEAD")
def head_cut_into_shards_of_the_vocabulary(h, w, y):
    shards = [h @ part.t() for part in w.chunk(4, 0)]
    largest = torch.stack([z.max(-1).values for z in shards]).max(0).values.detach()
    total = sum((z - largest[:, None]).exp().sum(-1) for z in shards)
    offset, chosen = 0, 0
    for z in shards:
        local = y - offset
        own = (local >= 0) & (local < z.shape[1])
        chosen = chosen + torch.where(own, pick(z, local.clamp(0, z.shape[1] - 1)), 0.0)
        offset += z.shape[1]
    return chosen - largest - total.log()


@case(
    "NO_HEAD", lambda: (normal(2, N, 16, seed=1, grad=True), normal(2, V, 16, seed=2, grad=True), ids(2, N)), whole=True
)
def head_of_its_own_for_every_sequence(h, w, y):
    return log_prob(torch.einsum("bnh,bvh->bnv", h, w), y)


# ---------------------------------------------------------------- weights made in the graph


@case("streamed", head(13, 16, 17, learned(4, 16), learned(17, 4, seed=6)), whole=True)
def low_rank_update_merged_into_a_small_vocabulary(h, w, y, a, b):
    return F.cross_entropy(h @ (w + b @ a).t(), y)


@case("streamed", also(lambda: normal(V, 1, seed=5).exp().requires_grad_()))
def weight_normalised_and_scaled(h, w, y, scale):
    return F.cross_entropy(h @ (scale * w / w.norm(dim=1, keepdim=True)).t(), y)


@case("streamed")
def tied_embedding_on_the_way_in(h, w, y):
    return F.cross_entropy((F.embedding(y, w) + h) @ w.t(), y.roll(-1))


@case("streamed", also(learned(V, 8, seed=9)), whole=True)
def probabilities_through_a_second_matrix(h, w, y, second):
    z = h @ w.t()
    return z.softmax(-1) @ second, z @ second


@case("streamed", also(lambda: normal(V, 8, seed=9)))
def several_products_without_gradients(h, w, y, second):
    with torch.no_grad():
        z = h @ w.t()
        p = z.softmax(-1)
        return z.relu() @ second, p @ second, z[:, :V] @ second, z @ second, z[:, 5:30] @ second[:25], pick(z, y)
