"""Online softmax statistics: what lets one pass over tiles of the vocabulary stand for several over all of it.

For logits ``z`` seen so far: ``m`` their maximum, ``s = sum(exp(z - r))`` and, where asked for,
``t = sum(exp(z - r) * (z - r))``, with the reference ``r = m``, or 0 where m is infinite.  Everything that log_softmax,
logsumexp, softmax and their entropy reduce over the vocabulary is a function of these three (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STATISTICS = {"softmax": 2, "softmax_weighted": 3, "sum": 1, "max": 1, "min": 1, "pick": 1, "hit": 1}
"""How many ``[n, 1]`` statistics a result of a tile keeps."""
ADDITIVE = ("sum", "pick", "hit")


def reference(m: Tensor) -> Tensor:
    """What is subtracted before exponentials: the maximum where it is finite."""
    return torch.where(m.isinf(), torch.zeros_like(m), m)


def of_tile(kind: str, z: Tensor) -> list[Tensor]:
    """Statistics of one tile ``[n, columns]``, each ``[n, 1]``."""
    if kind in ADDITIVE:
        return [z.sum(1, keepdim=True)]
    if kind in ("max", "min"):
        return [z.amax(1, keepdim=True) if kind == "max" else z.amin(1, keepdim=True)]
    m = z.amax(1, keepdim=True)
    if kind == "softmax":
        # Spelled as Inductor knows it, so that its generated code reads the tile once for both.
        s = (z - m).exp().sum(1, keepdim=True)
        return [m, torch.where(m.isinf(), torch.where(m > 0, torch.inf, 0.0).to(s.dtype), s)]
    d = z - reference(m)
    e = d.exp()
    return [m, e.sum(1, keepdim=True), (e * d).sum(1, keepdim=True)]


def merge(kind: str, a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Statistics of two disjoint sets of columns; an empty or all ``-inf`` set contributes nothing to the sums."""
    if kind in ADDITIVE:
        return [a[0] + b[0]]
    if kind in ("max", "min"):
        return [torch.maximum(a[0], b[0]) if kind == "max" else torch.minimum(a[0], b[0])]
    m = torch.maximum(a[0], b[0])
    shifts = [reference(part[0]) - reference(m) for part in (a, b)]
    scales = [
        torch.where(part[0] == -torch.inf, torch.zeros_like(shift), shift.exp())
        for part, shift in zip((a, b), shifts, strict=True)
    ]
    sums = [_scaled(scale, part[1]) for part, scale in zip((a, b), scales)]
    if kind == "softmax":
        return [m, sums[0] + sums[1]]
    t = [_scaled(scale, part[2] + shift * part[1]) for part, scale, shift in zip((a, b), scales, shifts)]
    return [m, sums[0] + sums[1], t[0] + t[1]]


def _scaled(scale: Tensor, value: Tensor) -> Tensor:
    """``scale * value``, where a scale of zero means that these columns no longer count, even if their sum
    overflowed."""
    return torch.where(scale == 0, torch.where(value.isnan(), value, torch.zeros_like(value)), scale * value)


def initial(kind: str) -> list[float]:
    """Statistics of no columns at all."""
    if kind in ADDITIVE:
        return [0.0]
    return [torch.inf] if kind == "min" else [-torch.inf, 0.0, 0.0][: STATISTICS[kind]]
