"""Kernels of the gradient filter: which columns are live, and what moves them together and back.

``columns`` is the width of a matrix, ``COLUMNS`` the list of its live columns, ascending, ``k`` their number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "most"])
def find(  # type: ignore[no-untyped-def]
    X, FLAGS, SUMS, COUNT, eps, n, columns, stride, most, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sets the flag of each column that a row of ``X`` ``[n, columns]`` keeps; SUMS ``[n]`` gets the sums of the rows.
    Does nothing where COUNT is above ``most``.  FLAGS has room for whole tiles of PARTS blocks, which are read at once.

    Takes any number of programs: few enough, and a row is still in the cache when it is read again.  All of them write
    the same, and all that is written is 1: in which order does not matter.
    """
    tile = tl.arange(0, PARTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = tl.where(tl.load(COUNT) > most, 0, n)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start_of_row = X + (row + tl.zeros([], tl.int64)) * stride
        largest = tl.zeros([BLOCK], tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, PARTS * BLOCK):
            at = start + tile
            x = tl.load(start_of_row + at, mask=at < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
            # As integers magnitudes have the same order, with nan above infinity: a maximum of floats loses it.
            largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
            total += tl.sum(x, 0)
        tl.store(SUMS + row, tl.sum(total, 0))
        largest_of_row = tl.max(largest, 0).to(tl.float32, bitcast=True)
        if largest_of_row != 0:  # true for a nan
            least = largest_of_row * eps
            for start in range(0, columns, PARTS * BLOCK):
                at = start + tile
                x = tl.load(start_of_row + at, mask=at < columns, other=0.0, eviction_policy="evict_first")
                # Not smaller, rather than at least as large: true for a nan.
                live = (tl.abs(x.to(tl.float32)) < least) == 0
                tl.store(FLAGS + at, tl.full([PARTS, BLOCK], 1, tl.int16), mask=live)


@triton.jit
def compact(FLAGS, COLUMNS, COUNT, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """COLUMNS gets the places of what is not 0 in FLAGS ``[columns]``, COUNT their number; one program a block, each of
    which counts for itself what is before its own."""
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    earlier = tl.zeros([BLOCK], tl.int32)
    for start in range(0, first, BLOCK):
        earlier += (tl.load(FLAGS + start + lane) != 0).to(tl.int32)
    before = tl.sum(earlier, 0)
    at = first + lane
    live = tl.load(FLAGS + at, mask=at < columns, other=0) != 0
    here = live.to(tl.int32)
    tl.store(COLUMNS + before + tl.cumsum(here, 0) - 1, at.to(tl.int64), mask=live)
    if first + BLOCK >= columns:
        tl.store(COUNT, before + tl.sum(here, 0))


@triton.jit(do_not_specialize=["k"])
def gather_columns(  # type: ignore[no-untyped-def]
    X, OUT, COLUMNS, LEFT, k, width, stride, out_stride, IS_SUMMED: tl.constexpr, BLOCK: tl.constexpr
):
    """``OUT[:, :k] = X[:, COLUMNS]``, and zeros up to ``width``; one program a row.  With IS_SUMMED the sum of what is
    gathered is taken from LEFT ``[n]``.

    OUT may be X: no column moves to the right, so what a block overwrites is read by itself or was before.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    gathered = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lane
        column = tl.load(COLUMNS + at, mask=at < k, other=0)
        x = tl.load(X + row * stride + column, mask=at < k, other=0.0)
        tl.debug_barrier()  # all of a block is read before any of it is written
        tl.store(OUT + row * out_stride + at, x, mask=at < width)
        gathered += x.to(tl.float32)
    if IS_SUMMED:
        tl.store(LEFT + row, tl.load(LEFT + row) - tl.sum(gathered, 0))


@triton.jit(do_not_specialize=["k"])
def scatter_columns(X, OUT, COLUMNS, k, stride, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``OUT[:, COLUMNS] = X[:, :k]``; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for start in range(0, k, BLOCK):
        at = start + lane
        column = tl.load(COLUMNS + at, mask=at < k, other=0)
        x = tl.load(X + row * stride + at, mask=at < k, other=0.0)
        tl.store(OUT + row * out_stride + column, x, mask=at < k)


@triton.jit(do_not_specialize=["k"])
def gather_rows(X, OUT, COLUMNS, k, columns, stride, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``OUT[:k] = X[COLUMNS]``, and zeros in the rows after these; one program a row of OUT."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(COLUMNS + i, mask=i < k, other=0)
    read = tl.where(i < k, columns, 0)
    lane = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        at = start + lane
        x = tl.load(X + row * stride + at, mask=at < read, other=0.0)
        tl.store(OUT + i * out_stride + at, x, mask=at < columns)


@triton.jit
def scatter_rows(X, OUT, COLUMNS, columns, stride, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``OUT[COLUMNS] = X[:k]``; one program a row of X, k of them."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(COLUMNS + i)
    lane = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        at = start + lane
        x = tl.load(X + i * stride + at, mask=at < columns, other=0.0)
        tl.store(OUT + row * out_stride + at, x, mask=at < columns)
