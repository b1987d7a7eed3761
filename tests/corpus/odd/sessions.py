"""One compiled function called with sizes, numbers and batches that change."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import entropy, head, log_prob, sequence
from tests.corpus.spellings import normal


@sequence("streamed", *(head(n) for n in (13, 7, 22, 1, 2, 0, 41, 16, 17)))
def token_counts(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), entropy(z)


@sequence("streamed", *(head(n, batch=b) for b, n in ((2, 7), (3, 7), (3, 9), (1, 9), (3, 1), (1, 1), (5, 3), (7, 7))))
def batches_and_times(h, w, y):
    z = F.linear(h, w)[:, :-1]
    return log_prob(z, y[:, 1:]), z.logsumexp(-1)


@sequence("streamed NO_HEAD", *(head(13, 16, v) for v in (41, 50, 17, 16, 15, 2, 1, 100)))
def vocabularies(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), entropy(z)


@sequence("streamed", *(head(13, 16, 41, lambda t=t: t) for t in (1.0, 0.7, 1.3, 2, 0.5)))
def temperatures_as_numbers(h, w, y, t):
    return log_prob(h @ w.t() / t, y)


@sequence("streamed", *(head(13, 16, 41, lambda c=c: c) for c in (1.0, 0.7, 1.3, 0.5)))
def number_in_many_places(h, w, y, c):
    z = h @ w.t()
    count = (z > c).long() * c
    z = z**2 * c
    z = torch.where(z > c, z, c)
    return z.logsumexp(-1), count.sum(-1), (z.bfloat16() * c).float().sum(-1), (z + z * c).amax(-1)


STARTS_AND_KS = ((2, 3), (3, 4), (5, 5), (0, 1), (-2, 2), (6, 9))


@sequence("streamed", *(head(7, 16, 41, lambda s=s: s, lambda k=k: k, batch=2) for s, k in STARTS_AND_KS))
def start_and_k_as_numbers(h, w, y, start, k):
    z = F.linear(h, w)[:, start:]
    return log_prob(z, y[:, start:]), z.topk(k, -1).values.sum(-1), z[..., : k + 10].logsumexp(-1)


def policy(batch, time):
    return head(
        time,
        16,
        41,
        lambda: normal(batch, time, seed=9) - 4,
        lambda: normal(batch, time, 16, seed=7),
        lambda: normal(batch, seed=6),
        lambda: (torch.arange(time)[None] < torch.arange(1, batch + 1)[:, None] * 2).float(),
        batch=batch,
    )


@sequence("streamed", *(policy(b, t) for b, t in ((4, 7), (2, 9), (3, 1), (1, 5), (1, 1))))
def whole_policy_loss_with_metrics(h, w, y, old, reference_h, advantage, mask):
    new = log_prob(F.linear(h, w).float(), y)
    with torch.no_grad():
        reference = log_prob(F.linear(reference_h, w).float(), y)
    ratio = (new - old).exp()
    gain = torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    kl = (reference - new).exp() - (reference - new) - 1
    loss = ((0.04 * kl - gain) * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"kl": kl.detach().mean(), "clipped": ((ratio - 1).abs() > 0.2).float().mean()}
