"""What a pass keeps of the columns that it has seen, one set a lane, and how the lanes are joined.

A sum of exponentials is kept relative to the maximum so far.  A new element costs one exponential: of the two, the sum
or the element, the one with the smaller reference is rescaled.  Infinite and nan elements end as in eager: see
:mod:`inductor_grpo.online`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(m, x):  # type: ignore[no-untyped-def]
    """The larger of the two, or the nan among them."""
    return tl.where((x > m) | (x != x), x, m)


@triton.jit
def smaller(m, x):  # type: ignore[no-untyped-def]
    return tl.where((x < m) | (x != x), x, m)


@triton.jit
def joined(m, s, x):  # type: ignore[no-untyped-def]
    """The sum of exponentials ``s`` relative to ``m``, and that of x, relative to the larger of m and x.

    Equal infinities have no difference: they count as 1 each, which only matters where it is overruled at the end."""
    e = tl.exp(-tl.abs(x - m))
    return tl.where(x > m, s * e + 1, s + tl.where(x == m, 1, e))


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
