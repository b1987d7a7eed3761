"""Writes: into the logits, into inputs and buffers before and after they are read, and by hand-written backwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import N, V, also, case, head, log_prob, pick
from tests.corpus.spellings import normal


def running_mean(h, w, y, running):
    lse = (h @ w.t()).logsumexp(-1)
    running.mul_(0.9).add_(lse.detach().mean())
    return lse.mean()


case("streamed", also(lambda: torch.ones(())))(running_mean)


@case("streamed", also(lambda: torch.ones(()), grad=False))
def running_mean_without_gradients(h, w, y, running):
    return running_mean(h, w, y, running)


@case("streamed", also(lambda: torch.zeros(V)))
def histogram_of_the_vocabulary(h, w, y, histogram):
    z = h @ w.t()
    histogram += z.detach().softmax(-1).sum(0)
    return log_prob(z, y)


@case("streamed", also(lambda: torch.zeros(N)))
def log_probs_added_to_an_input(h, w, y, total):
    total.add_(log_prob(h @ w.t(), y).detach())
    twice = h * 1
    twice.mul_(2)
    return (twice @ w.t()).logsumexp(-1) + total


@case("streamed", head(grad=False))
def weight_changed_between_two_products(h, w, y):
    before = (h @ w.t()).logsumexp(-1)
    w.mul_(2)
    return before, (h @ w.t()).logsumexp(-1)


@case("streamed", head(grad=False))
def hidden_zeroed_after_the_product(h, w, y):
    z = h @ w.t()
    h.zero_()
    return z.logsumexp(-1), pick(z, y)


@case("streamed", head(grad=False))
def labels_changed_after_the_loss(h, w, y):
    value = log_prob(h @ w.t(), y)
    y.add_(1).remainder_(V)
    return value, log_prob(h @ w.t(), y)


@case("streamed")
def label_banned(h, w, y):
    z = h @ w.t()
    z[torch.arange(N), y] = -1e9
    return z.logsumexp(-1), pick(z, y.roll(1))


@case("streamed", also(lambda: normal(V, seed=4, grad=True)))
def columns_overwritten_after_a_bias(h, w, y, bias):
    z = torch.addmm(bias, h, w.t())
    z[:, 7] = 0
    z[:, :3] = -5.0
    return z.logsumexp(-1), pick(z, y)


@case("streamed")
def rows_and_columns_written(h, w, y):
    z = h @ w.t()
    z[2:5] *= 2
    z[:, 3:7] -= 1
    z[torch.arange(N), y] += 0.5
    z.clamp_(-3, 3)
    return z.logsumexp(-1)


@case("streamed")
def chosen_rows_written(h, w, y):
    z = h @ w.t()
    z[y > 20] = 0
    return z.logsumexp(-1)


@case("streamed")
def strided_block_written(h, w, y):
    z = h @ w.t()
    z[::2, ::3].mul_(0.5)
    return z.logsumexp(-1)


@case("LAYOUT")
def one_element_written_through_a_flat_view(h, w, y):
    z = h @ w.t()
    z.view(-1)[5] = 1
    return z.logsumexp(-1)


@case("streamed")
def last_element_written(h, w, y):
    z = h @ w.t()
    z[-1, -1] = 4
    return z.logsumexp(-1)


# ---------------------------------------------------------------- backwards by hand


@case("streamed")
def gradients_by_hand(h, w, y):
    with torch.no_grad():
        z = h @ w.t()
        d = z.softmax(-1) - F.one_hot(y, V)
        return d @ w, d.t() @ h, d.sum(0), log_prob(z, y)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, y):
        z = h @ w.t()
        ctx.save_for_backward(z.softmax(-1), h, w, y)
        return F.cross_entropy(z, y, reduction="none")

    @staticmethod
    def backward(ctx, gradient):
        p, h, w, y = ctx.saved_tensors
        d = (p - F.one_hot(y, p.shape[-1])) * gradient[:, None]
        return d @ w, d.t() @ h, None


@case("streamed")
def gradients_in_an_autograd_function(h, w, y):
    return ByHand.apply(h, w, y)


@case("NO_ROW_RULE")
def gradients_by_hand_with_duplicate_rows(h, w, y):
    with torch.no_grad():
        z = (h @ w.t()).softmax(-1)
        d = torch.zeros(N, V).index_put((torch.tensor([0, 0, 3, 3, 2]),), z[:5])
        return d @ w, d.t() @ h


@case("MIXES_ROWS")
def duplicate_rows_written_into_zeros(h, w, y):
    d = torch.zeros(N, V).index_put((torch.tensor([0, 0, 3, 3, 2]),), (h @ w.t()).softmax(-1)[:5])
    return d @ w
