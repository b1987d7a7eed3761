"""Launching the filter's kernels.  A kernel that does not compile never ends a step: torch does its work, and that of
all the others from then on."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inductor_grpo import packing
from inductor_grpo.row_kernel import launch as row_kernels

log = logging.getLogger("inductor_grpo")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """Elements of a row that a program takes at a time, and its warps."""

    block: int
    warps: int

    def of(self, columns: int) -> Tile:
        """The same for a row of so many columns."""
        block = min(self.block, max(16, 1 << max(0, columns - 1).bit_length()))
        return Tile(block, max(1, min(self.warps, block // 32)))


# One program of 32 warps on each multiprocessor: on an H200 132 rows of 300 kB are in the cache then, and four loads of
# 128 bits a thread keep the memory busy.
FIND, FIND_PARTS = Tile(8192, 32), 4
# One in so many rows is looked at before all are, where that makes as many rows.
SAMPLE = 64
COMPACT = Tile(4096, 8)
# Of the kernels that move columns, and of those that move rows.
PACK, MOVE = Tile(2048, 4), Tile(2048, 4)


class Kernels:
    """The kernels of one process; ``problem``: why they are not used any more."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def run(self, name: str, programs: int, tile: Tile, device: torch.device, *arguments: Any, **options: Any) -> bool:
        """Launches a kernel; False where there are none."""
        if self.problem is not None:
            return False
        try:
            from inductor_grpo.filter import kernels

            with packing.on(device):
                getattr(kernels, name)[(programs,)](*arguments, BLOCK=tile.block, num_warps=tile.warps, **options)
        except Exception as error:
            # On a CPU there is the interpreter alone, which only tests run.
            if device.type != "cuda" or isinstance(error, torch.OutOfMemoryError):
                raise
            self.problem = f"{type(error).__name__}: {error}"
            log.warning("a kernel of the gradient filter does not compile, torch is used: %s", self.problem[:2000])
            return False
        return True


KERNELS = Kernels()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs :func:`find` runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(device: torch.device) -> bool:
    """Whether the filter on ``device`` has kernels."""
    return device.type == "cuda" and row_kernels.available(device)


def find(value: Tensor, eps: float, most: int) -> tuple[Tensor, Tensor] | None:
    """The live columns of a gradient ``[n, V]``, ascending, and the sums of its rows; waits for the device.  Where more
    than ``most`` are live both may be incomplete, though not so that fewer than that are left.

    None where no kernel tells."""
    if value.dtype not in DTYPES or value.stride(1) != 1:
        return None
    (n, width), device = value.shape, value.device
    tile, lister = FIND.of(width), COMPACT.of(width)
    step = FIND_PARTS * tile.block
    flags = torch.zeros(-(-width // step) * step, dtype=torch.int16, device=device)
    sums = torch.empty(n, dtype=torch.float32, device=device)
    columns = torch.empty(width, dtype=torch.int64, device=device)
    count = torch.zeros((), dtype=torch.int32, device=device)
    # Where a few rows have most columns already, all rows are not read.
    for every in (SAMPLE, 1) if n >= SAMPLE * SAMPLE else (1,):
        rows = n // every
        arguments = (value, flags, sums, count, eps, rows, width, every * value.stride(0), most)
        if not KERNELS.run("find", min(rows, multiprocessors(device)), tile, device, *arguments, PARTS=FIND_PARTS):
            return None
        programs = -(-width // lister.block)
        if not KERNELS.run("compact", programs, lister, device, flags, columns, count, width):
            return None
    return columns[: int(count.item())], sums


def pack(value: Tensor, columns: Tensor, width: int, sums: Tensor, owned: bool) -> Tensor:
    """The columns of a gradient, and zero ones up to ``width`` together; with ``owned`` they move to the front of its
    own memory.  What they add up to is taken from ``sums`` ``[n]``."""
    n, k = value.shape[0], columns.shape[0]
    packed = value[:, :width] if owned else value.new_empty(n, width)
    arguments = (value, packed, columns, sums, k, width, value.stride(0), packed.stride(0))
    if not KERNELS.run("gather_columns", n, PACK.of(width), value.device, *arguments, IS_SUMMED=True):
        kept = value.index_select(1, columns)
        sums -= kept.sum(1, dtype=sums.dtype)
        packed[:, :k] = kept
        packed[:, k:] = 0
    return packed


def gather(x: Tensor, columns: Tensor, width: int) -> Tensor:
    """The rows ``columns`` of ``x`` ``[V, c]``, and zero ones up to ``width`` together, in memory as x lies."""
    k, (_, c), device = columns.shape[0], x.shape, x.device
    if is_transposed(x):
        lying = x.new_empty(c, width)
        out, given = lying.t(), (x.t(), lying, columns, None, k, width, x.stride(1), width)
        done = KERNELS.run("gather_columns", c, PACK.of(width), device, *given, IS_SUMMED=False)
    else:
        out = x.new_empty(width, c)
        done = x.stride(1) == 1 and KERNELS.run(
            "gather_rows", width, MOVE.of(c), device, x, out, columns, k, c, x.stride(0), c
        )
    if not done:
        out[:k] = x.index_select(0, columns)
        out[k:] = 0
    return out


def scatter(rows: Tensor, columns: Tensor, x: Tensor) -> None:
    """Writes the first of ``rows``, which :func:`gather` has laid out, over the rows ``columns`` of ``x``."""
    k, c = columns.shape[0], x.shape[1]
    if is_transposed(x):
        given = (rows.t(), x.t(), columns, k, rows.stride(1), x.stride(1))
        done = KERNELS.run("scatter_columns", c, PACK.of(k), x.device, *given)
    else:
        given = (rows, x, columns, c, rows.stride(0), x.stride(0))
        done = x.stride(1) == 1 and KERNELS.run("scatter_rows", k, MOVE.of(c), x.device, *given)
    if not done:
        x.index_copy_(0, columns, rows[:k])


def is_transposed(x: Tensor) -> bool:
    """Whether the columns of ``x`` are what lies together."""
    return x.stride(0) == 1 and x.stride(1) != 1
