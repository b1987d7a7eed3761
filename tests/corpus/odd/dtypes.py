"""Dtypes: all of one, mixed, quantised, complex; and random numbers that are not drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.odd.registry import V, case, entropy, head, log_prob
from tests.corpus.spellings import ids, normal

BF16 = torch.bfloat16


@case("streamed", head(dtype=BF16))
def all_in_bf16(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), z.float().logsumexp(-1), z.sum(-1), z.mean()


@case("streamed", head(dtype=BF16))
def entropy_in_bf16_and_in_float32(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), entropy(z), log_prob(z.float(), y), entropy(z.float())


@case("streamed", head(dtype=torch.float64))
def float64_narrowed(h, w, y):
    z = h @ w.t()
    return log_prob(z, y), entropy(z), z.float().logsumexp(-1)


@case("streamed")
def narrow_product_of_wide_inputs(h, w, y):
    return F.cross_entropy((h.to(BF16) @ w.to(BF16).t()).float(), y)


@case("streamed", lambda: (normal(13, 16, seed=1, grad=True), normal(V, 16, seed=2, dtype=BF16), ids(13)))
def autocast_of_mixed_inputs(h, w, y):
    with torch.autocast("cpu", BF16):
        z = F.linear(h, w)
        loss = F.cross_entropy(z, y)
    return loss, z.float().logsumexp(-1)


@case("NO_ROW_RULE", lambda: (normal(13, 16, seed=1).cfloat(), normal(V, 16, seed=2).cfloat(), ids(13)))
def complex_head(h, w, y):
    z = h @ w.t()
    return log_prob(z.abs(), y), z.real.logsumexp(-1)


@case("streamed", head(13, 16, V, lambda: normal(V, 1, seed=5).exp(), grad=False))
def weight_of_eight_bits_scaled(h, w, y, scale):
    narrow = (w / scale).round().clamp(-127, 127).to(torch.int8)
    return F.cross_entropy(h @ (narrow.float() * scale).t(), y)


@case("streamed", head(grad=False))
def weight_in_float8(h, w, y):
    return F.cross_entropy(h @ w.to(torch.float8_e4m3fn).float().t(), y)


@case("streamed")
def logits_rounded_with_a_straight_through_gradient(h, w, y):
    w = w + ((w * 8).round() / 8 - w).detach()
    z = h @ w.t()
    return F.cross_entropy(z + ((z * 4).round() / 4 - z).detach(), y)


@case("streamed")
def dropout_that_drops_nothing(h, w, y):
    z = h @ w.t()
    return F.cross_entropy(F.dropout(h, 0.0) @ w.t(), y), F.dropout(z, 0.3, training=False).logsumexp(-1)


@case("streamed", head(13, 4, 37))
def counts_and_flags(h, w, y):
    z = h @ w.t()
    return (z > 0).sum(1), (z > 0).long().amax(-1), (z > 0).int().amin(-1), (z > 2).any(-1), z.logsumexp(-1)


@case("streamed NO_ROW_RULE", head(13, 16, V, lambda: ids(13, V, high=2, seed=5)), whole=True)
def label_looked_up_in_masks_of_integers(h, w, y, mask):
    z = h @ w.t()
    picked = [m.gather(1, y[:, None]) for m in (mask, mask.bool(), z * mask)]
    return log_prob(z, y), *picked
