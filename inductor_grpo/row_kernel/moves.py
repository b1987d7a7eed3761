"""Kernels that pack the live rows of a chunk where they lie, and spread what was made of them.

Of n rows the first ``kept`` are to hold all live rows.  *Holes* are the dead rows among them, in order; *fillers* the
live rows after them.  There are at least as many holes as fillers: hole k is filled from filler k, and the holes that
are left are zero.  No filler is a hole, so all rows move at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "least", "align"])
def plan(LIVE, ORDER, HOLES, FILLERS, COUNTS, n, least, align, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the bytes ``LIVE`` ``[n]``: COUNTS gets the live rows, the kept ones, the fillers and the holes; ORDER
    ``[n]`` in its first ``kept`` places the rows that are to lie there.

    The number of kept rows is a multiple of ``align``, or n; all n are kept where fewer than ``least`` are dead.
    """
    lane = tl.arange(0, BLOCK)
    live = 0
    for start in range(0, n, BLOCK):
        at = start + lane
        live += tl.sum((tl.load(LIVE + at, mask=at < n, other=0) != 0).to(tl.int32), 0)
    kept = tl.minimum((live + align - 1) // align * align, n)
    kept = tl.where(n - live < least, n, kept)
    holes = 0
    fillers = 0
    for start in range(0, n, BLOCK):
        at = start + lane
        is_live = tl.load(LIVE + at, mask=at < n, other=0) != 0
        hole = (at < kept) & (is_live == 0)
        filler = (at >= kept) & is_live
        tl.store(ORDER + at, at.to(tl.int64), mask=at < n)
        tl.store(HOLES + holes + tl.cumsum(hole.to(tl.int32), 0) - 1, at.to(tl.int64), mask=hole)
        tl.store(FILLERS + fillers + tl.cumsum(filler.to(tl.int32), 0) - 1, at.to(tl.int64), mask=filler)
        holes += tl.sum(hole.to(tl.int32), 0)
        fillers += tl.sum(filler.to(tl.int32), 0)
    tl.debug_barrier()  # other warps wrote what this one reads
    for start in range(0, fillers, BLOCK):
        at = start + lane
        hole = tl.load(HOLES + at, mask=at < fillers, other=0)
        tl.store(ORDER + hole, tl.load(FILLERS + at, mask=at < fillers, other=0), mask=at < fillers)
    tl.store(COUNTS, live)
    tl.store(COUNTS + 1, kept)
    tl.store(COUNTS + 2, fillers)
    tl.store(COUNTS + 3, holes)


@triton.jit(do_not_specialize=["blocks"])
def pack(X, HOLES, FILLERS, COUNTS, columns, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fills the holes of ``X`` ``[n, columns]``, a row of which is cut into ``blocks``; takes any number of programs,
    since how much there is to do is known on the device alone."""
    fillers, holes = tl.load(COUNTS + 2), tl.load(COUNTS + 3)
    lane = tl.arange(0, BLOCK)
    for task in range(tl.program_id(0), holes * blocks, tl.num_programs(0)):
        k = task // blocks
        at = task % blocks * BLOCK + lane
        is_filled = k < fillers
        filler = tl.where(is_filled, tl.load(FILLERS + k), 0)  # no more holes than n, which FILLERS has room for
        x = tl.load(X + filler * columns + at, mask=at < tl.where(is_filled, columns, 0), other=0)
        tl.store(X + tl.load(HOLES + k) * columns + at, x, mask=at < columns)


@triton.jit
def spread(X, LIVE, HOLES, FILLERS, COUNTS, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Takes back to the fillers what lies in the holes of ``X`` ``[n, columns]``, and makes all dead rows zero; one
    program for each filler, then one for each row that is not kept."""
    kept, fillers = tl.load(COUNTS + 1), tl.load(COUNTS + 2)
    k = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if k < fillers:
        to, row = tl.load(FILLERS + k), tl.load(HOLES + k)
        for start in range(0, columns, BLOCK):
            at = start + lane
            x = tl.load(X + row * columns + at, mask=at < columns, other=0)
            tl.store(X + to * columns + at, x, mask=at < columns)
            tl.store(X + row * columns + at, tl.zeros_like(x), mask=at < columns)
    else:
        rest = (kept + k - fillers).to(tl.int64)
        if tl.load(LIVE + rest) == 0:
            for start in range(0, columns, BLOCK):
                at = start + lane
                tl.store(X + rest * columns + at, tl.zeros([BLOCK], X.dtype.element_ty), mask=at < columns)
