"""Function transforms, checkpoints, graph breaks, and sizes that are symbols."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.odd.registry import also, case, head, log_prob
from tests.corpus.spellings import ids, normal


def gradients(h, w, y):
    loss = lambda h, w: F.cross_entropy(h @ w.t(), y)
    of_hidden, of_weight = torch.func.grad(loss, (0, 1))(h.detach(), w.detach())
    return of_hidden.norm(), of_weight.norm(), loss(h, w)


@case("streamed")
def gradient_inside(h, w, y):
    return gradients(h, w, y)


@case("streamed", head(3, 16, 20))
def gradient_inside_with_fewer_tokens_than_features(h, w, y):
    return gradients(h, w, y)


@case("MIXES_ROWS", head(3, 16, 20))
def gradient_per_token(h, w, y):
    loss = lambda w, h, y: F.cross_entropy((h @ w.t())[None], y[None])
    per_token = torch.vmap(torch.func.grad(loss), (None, 0, 0))(w.detach(), h.detach(), y)
    return per_token.square().sum((1, 2))


@case("streamed")
def derivative_along_a_direction(h, w, y):
    return torch.func.jvp(lambda h: log_prob(h @ w.t(), y), (h,), (torch.ones_like(h),))[1]


@case("streamed")
def checkpointed_twice(h, w, y):
    loss = lambda h, w: log_prob(h @ w.t(), y)
    return checkpoint(loss, h, w, use_reentrant=False), checkpoint(loss, h * 2, w, use_reentrant=False)


@case("streamed LOGITS_RETURNED NO_ROW_RULE")
def logits_across_a_graph_break(h, w, y):
    z = h @ w.t()
    lse = z.logsumexp(-1)
    torch._dynamo.graph_break()
    return lse - z.gather(1, y[:, None])[:, 0], log_prob(h @ w.t(), y)


@case("streamed NO_HEAD")
def loss_read_as_a_number(h, w, y):
    loss = F.cross_entropy(h @ w.t(), y)
    return loss, loss * (1 + abs(loss.item()))


# ---------------------------------------------------------------- sizes that are symbols


@case("streamed", also(lambda: 2), dynamic=True)
def dynamic_integer_temperature(h, w, y, t):
    return log_prob(h @ w.t() / t, y)


@case("streamed", also(lambda: 1.5), dynamic=True)
def dynamic_number_as_a_clamp_bound(h, w, y, bound):
    return log_prob((h @ w.t()).clamp(-bound, bound), y)


@case("streamed", also(lambda: 1.0), dynamic=True)
def dynamic_number_as_a_factor_and_as_a_filling(h, w, y, c):
    z = h @ w.t()
    return torch.where(z > c, z, c).logsumexp(-1), z.add(z, alpha=c).amax(-1)


@case("streamed", lambda: (normal(2, 2, 7, seed=0, grad=True), normal(37, 7, seed=2)), dynamic=True)
def dynamic_roll_by_the_number_of_rows(h, w):
    z = h @ w.t()
    return (z + 0.3 * z.roll(2, 1)).logsumexp(-1)


@case("LAYOUT", lambda: (normal(2, 2, 7, seed=0, grad=True), normal(17, 7, seed=2), ids(2, 2, high=17)), dynamic=True)
def dynamic_flat_index_of_stacked_rows(h, w, y):
    z = h @ w.t()
    log_probs = torch.cat([z, z * 0.5], 1).log_softmax(-1).flatten(0, -2)
    return log_probs[torch.arange(8), torch.cat([y, y], 1).flatten()]


@case("streamed", head(7, 16, 23, batch=2), dynamic=True)
def dynamic_slice_of_time_scaled_by_its_mean(h, w, y):
    z = h @ w.t()
    z = (z * z.std(2, keepdim=True).detach())[:, 1:3:2]
    scaled = z * (1 + 0.1 * z.logsumexp(2).mean())
    return z.mean(), log_prob(scaled, y[:, 1:3:2])


@case("streamed", head(7, 16, 23, batch=2), dynamic=True)
def dynamic_roll_of_vocabulary_in_stacked_rows(h, w, y):
    z = (h @ w.t()).roll(3, 2).tanh() * 3
    z = torch.stack([z.select(0, 0), *z.unbind(0)[1:]], 0)
    return z.mean(), (z > 0).sum(2), log_prob(z, y)
