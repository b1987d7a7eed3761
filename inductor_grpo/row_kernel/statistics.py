"""What a pass keeps of the columns that it has seen, one set a lane, and how the lanes are joined.

A sum of exponentials is kept relative to the maximum so far, and rescaled once for all tiles of a block.  Infinite and
nan elements end as in eager: see :mod:`inductor_grpo.online`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(m, x):  # type: ignore[no-untyped-def]
    """The larger of the two, or the nan among them."""
    return tl.maximum(m, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(m, x):  # type: ignore[no-untyped-def]
    return tl.minimum(m, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def base(top):  # type: ignore[no-untyped-def]
    """What is subtracted before an exponential: the maximum, or 0 where there is no element yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def largest(m):  # type: ignore[no-untyped-def]
    """Over the lanes."""
    bad = tl.max((m != m).to(tl.int32), 0)
    return tl.where(bad > 0, float("nan"), tl.max(tl.where(m != m, float("-inf"), m), 0))


@triton.jit
def smallest(m):  # type: ignore[no-untyped-def]
    bad = tl.max((m != m).to(tl.int32), 0)
    return tl.where(bad > 0, float("nan"), tl.min(tl.where(m != m, float("inf"), m), 0))


@triton.jit
def total(m, s, top):  # type: ignore[no-untyped-def]
    """The sum of ``exp(y - top)`` from the lanes' maxima and sums: not a number where ``top`` is not finite."""
    scaled = tl.where(m == float("-inf"), 0.0, s * tl.exp(m - top))
    return tl.where(tl.abs(top) == float("inf"), float("nan"), tl.sum(scaled, 0))


@triton.jit
def finite_total(m, s, top):  # type: ignore[no-untyped-def]
    """The same with 0 in the place of an infinite ``top``: without columns 0, with an infinite one infinite."""
    sum_of = tl.where(tl.abs(top) == float("inf"), tl.maximum(top, 0), total(m, s, top))
    return sum_of
