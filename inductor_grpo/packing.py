"""Moving the live rows of a chunk together: on the host's word, or where a device has kernels for it without asking it.

A host finds out how many rows are live only when the device has found it; what the device can do before that, it does
meanwhile (:meth:`DevicePacking.pack`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from inductor_grpo.row_kernel import launch

# Rows moved at once when a chunk is packed where it lies.
BLOCK_ROWS = 256
# Elements that a kernel moves at a time, and the warps and programs that do.
BLOCK, WARPS, PROGRAMS = 2048, 8, 8 * 132
# Rows that the plan looks at at a time.
PLAN_BLOCK = 4096


def step_of(n: int) -> int:
    """What the number of kept rows is a multiple of: whole tiles of a matmul, where they are few of all rows."""
    return 128 if n >= 1024 else 16 if n >= 128 else 1


class Packing(NamedTuple):
    """The ``order`` of live rows that moves few of them: positions ``[k]`` of the rows, of which those in ``holes`` are
    filled from ``fillers`` and the others lie where they are."""

    order: Tensor
    holes: Tensor
    fillers: Tensor

    @staticmethod
    def of(live: Tensor) -> Packing:
        """From the flags ``[n]`` of the live rows; waits for the device."""
        flags = live.to(device="cpu", dtype=torch.bool)
        count = int(flags.sum())
        holes = flags[:count].logical_not().nonzero().squeeze(1)
        fillers = flags[count:].nonzero().squeeze(1) + count
        order = torch.arange(count)
        order[holes] = fillers
        return Packing(*(x.to(live.device, non_blocking=True) for x in (order, holes, fillers)))

    def rows(self, x: Tensor) -> Tensor:
        """The live rows of ``x``, copied."""
        return x.index_select(0, self.order)

    def rows_in_place(self, x: Tensor) -> Tensor:
        """The live rows of ``x``, moved to the front of its own memory."""
        wide = _in_words(x)
        for start in range(0, self.holes.shape[0], BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            wide.index_copy_(0, self.holes[part], wide.index_select(0, self.fillers[part]))
        return x[: self.order.shape[0]]

    def room(self, result: Tensor) -> Tensor:
        """Where a product of the live rows goes whose rows are to be spread over ``result``."""
        return result.new_empty(self.order.shape[0], result.shape[1])

    def spread(self, product: Tensor, result: Tensor) -> None:
        """The rows of a product, in its :meth:`room`, to their places in ``result``; its other rows are zero."""
        result.zero_().index_copy_(0, self.order, product)


class DevicePacking:
    """The same from kernels; among the rows that are kept there may be dead ones, whose gradient is zero.

    ``live``: int8 ``[n]``, not 0 where a row is live; ``least``: dead rows from which it is worth the while.  All rows
    are kept, and none moves, where there are fewer."""

    def __init__(self, live: Tensor, least: int) -> None:
        from inductor_grpo.row_kernel import moves

        n, device = live.shape[0], live.device
        block = min(PLAN_BLOCK, max(128, 1 << (n - 1).bit_length()))
        self._moves, self._live = moves, live
        self._order, self._holes, self._fillers = torch.empty(3, n, dtype=torch.int64, device=device).unbind()
        self._counts = torch.empty(4, dtype=torch.int32, device=device)
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None
        self._known: list[int] = []
        with on(device):
            moves.plan[(1,)](
                live,
                self._order,
                self._holes,
                self._fillers,
                self._counts,
                n,
                least,
                step_of(n),
                BLOCK=block,
                num_warps=max(1, block // 256),
            )
            if device.type == "cuda":
                host = torch.empty(4, dtype=torch.int32, pin_memory=True)
                host.copy_(self._counts, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._sent = (host, event)

    def pack(self, x: Tensor) -> None:
        """Moves the rows of ``x`` ``[n, c]`` that are to be kept to its front, without waiting for their number; dead
        rows among those become zero."""
        wide = _in_words(x)
        blocks = -(-wide.shape[1] // BLOCK)
        programs = min(PROGRAMS, x.shape[0] * blocks)
        with on(x.device):
            self._moves.pack[(programs,)](
                wide, self._holes, self._fillers, self._counts, wide.shape[1], blocks, BLOCK=BLOCK, num_warps=WARPS
            )

    @property
    def counts(self) -> list[int]:
        """How many rows are live, are kept, are fillers, and are holes; waits until that is known."""
        if not self._known:
            host = self._counts
            if self._sent is not None:
                host = self._sent[0]
                self._sent[1].synchronize()
                self._sent = None
            self._known = host.tolist()
        return self._known

    @property
    def order(self) -> Tensor:
        """The rows that are kept, where they lie when packed."""
        return self._order[: self.counts[1]]

    def rows(self, x: Tensor) -> Tensor:
        """The kept rows of ``x``, copied."""
        return x.index_select(0, self.order)

    def rows_in_place(self, x: Tensor) -> Tensor:
        """The kept rows of ``x``, which :meth:`pack` has moved."""
        return x[: self.counts[1]]

    def room(self, result: Tensor) -> Tensor:
        """The front of ``result``."""
        return result[: self.counts[1]]

    def spread(self, product: Tensor, result: Tensor) -> None:
        """The rows of a product, in its :meth:`room`, to their places in ``result``; its other rows are zero."""
        n, columns = result.shape
        _, kept, fillers, _ = self.counts
        if columns and (tasks := fillers + n - kept):
            block = min(BLOCK, 1 << (columns - 1).bit_length())
            with on(result.device):
                self._moves.spread[(tasks,)](
                    result, self._live, self._holes, self._fillers, self._counts, columns, BLOCK=block, num_warps=4
                )


def on_device(device: torch.device) -> bool:
    """Whether the rows of a chunk on ``device`` are packed by kernels."""
    return device.type == "cuda" and launch.available(device)


def on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _in_words(x: Tensor) -> Tensor:
    """The memory of contiguous rows as the largest integers that it divides into: CUDA moves one at a time."""
    for word in (torch.int64, torch.int32):
        bytes_before = x.storage_offset() * x.element_size()
        if x.shape[1] * x.element_size() % word.itemsize == 0 and bytes_before % word.itemsize == 0:
            return x.view(word)
    return x
