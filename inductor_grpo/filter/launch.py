"""Launching the filter's kernels.  A kernel that does not compile never ends a step: torch does its work, and that of
all the others from then on."""

from __future__ import annotations

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
        return Tile(block, max(1, min(self.warps, block // 128)))


# One program of 32 warps on each multiprocessor: 132 rows of 300 kB are in the cache then, and two loads of 128 bits a
# thread keep the memory busy.
FIND, FIND_PROGRAMS = Tile(16384, 32), 132
COMPACT = Tile(4096, 8)
MOVE = Tile(2048, 4)


class Kernels:
    """The kernels of one process; ``problem``: why they are not used any more."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def run(self, name: str, programs: int, tile: Tile, device: torch.device, *arguments: Any) -> bool:
        """Launches a kernel; False where there are none."""
        if self.problem is not None:
            return False
        try:
            from inductor_grpo.filter import kernels

            with packing.on(device):
                getattr(kernels, name)[(programs,)](*arguments, BLOCK=tile.block, num_warps=tile.warps)
        except Exception as error:
            # On a CPU there is the interpreter alone, which only tests run.
            if device.type != "cuda" or isinstance(error, torch.OutOfMemoryError):
                raise
            self.problem = f"{type(error).__name__}: {error}"
            log.warning("a kernel of the gradient filter does not compile, torch is used: %s", self.problem[:2000])
            return False
        return True


KERNELS = Kernels()


def on_device(device: torch.device) -> bool:
    """Whether the filter on ``device`` has kernels."""
    return device.type == "cuda" and row_kernels.available(device)


def find(value: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """The live columns of a gradient ``[n, V]``, ascending, and the sums of its rows; waits for the device.

    None where no kernel tells."""
    if value.dtype not in DTYPES or value.stride(1) != 1:
        return None
    (n, width), device = value.shape, value.device
    flags = torch.zeros(width, dtype=torch.int8, device=device)
    sums = torch.empty(n, dtype=torch.float32, device=device)
    arguments = (value, flags, sums, eps, n, width, value.stride(0))
    if not KERNELS.run("find", min(n, FIND_PROGRAMS), FIND.of(width), device, *arguments):
        return None
    columns = torch.empty(width, dtype=torch.int64, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    tile = COMPACT.of(width)
    if not KERNELS.run("compact", -(-width // tile.block), tile, device, flags, columns, count, width):
        return None
    return columns[: int(count.item())], sums


def pack(value: Tensor, columns: Tensor, width: int, sums: Tensor, owned: bool) -> Tensor:
    """The columns of a gradient, and zero ones up to ``width`` together; with ``owned`` they move to the front of its
    own memory.  What they add up to is taken from ``sums`` ``[n]``."""
    n, k = value.shape[0], columns.shape[0]
    packed = value[:, :width] if owned else value.new_empty(n, width)
    arguments = (value, packed, columns, sums, k, width, value.stride(0), packed.stride(0), True)
    if not KERNELS.run("gather_columns", n, MOVE.of(width), value.device, *arguments):
        kept = value.index_select(1, columns)
        sums -= kept.sum(1, dtype=sums.dtype)
        packed[:, :k] = kept
        packed[:, k:] = 0
    return packed


def gather(x: Tensor, columns: Tensor, width: int) -> Tensor:
    """The rows ``columns`` of ``x`` ``[V, c]``, and zero ones up to ``width`` together, in memory as x lies."""
    k, (_, c), device = columns.shape[0], x.shape, x.device
    if is_transposed(x):
        out = x.new_empty(c, width)
        arguments = (x.t(), out, columns, out, k, width, x.stride(1), width, False)
        done = KERNELS.run("gather_columns", c, MOVE.of(width), device, *arguments)
        out = out.t()
    else:
        out = x.new_empty(width, c)
        arguments = (x, out, columns, k, c, x.stride(0), c)
        done = x.stride(1) == 1 and KERNELS.run("gather_rows", width, MOVE.of(c), device, *arguments)
    if not done:
        out[:k] = x.index_select(0, columns)
        out[k:] = 0
    return out


def scatter(rows: Tensor, columns: Tensor, x: Tensor) -> None:
    """Writes the first of ``rows``, which :func:`gather` has laid out, over the rows ``columns`` of ``x``."""
    k, c = columns.shape[0], x.shape[1]
    if is_transposed(x):
        arguments = (rows.t(), x.t(), columns, k, rows.stride(1), x.stride(1))
        done = KERNELS.run("scatter_columns", c, MOVE.of(k), x.device, *arguments)
    else:
        arguments = (rows, x, columns, c, rows.stride(0), x.stride(0))
        done = x.stride(1) == 1 and KERNELS.run("scatter_rows", k, MOVE.of(c), x.device, *arguments)
    if not done:
        x.index_copy_(0, columns, rows[:k])


def is_transposed(x: Tensor) -> bool:
    """Whether the columns of ``x`` are what lies together."""
    return x.stride(0) == 1 and x.stride(1) != 1
