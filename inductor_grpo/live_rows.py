"""Rows without a gradient: padding, masked and clipped tokens, groups without an advantage.

The gradient of such a row's logits is exactly zero, all of it, so it adds nothing to the gradient of the weight and its
own gradient of hidden is zero.  The matmuls of a chunk run over the other rows alone.  Nothing is approximated, and
what is not finite stays so: a row whose hidden state has a nan or an infinity counts as live (0 * inf is nan), and with
such a weight every row does.

Which rows are live is known on the device only once the chunk's gradient is.  A CPU looks at once.  CUDA has to wait
for the answer, so it first watches: a few columns of each row say, a step later and without waiting, how many rows seem
dead.  Only where they were many does a step wait for each chunk's answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inductor_grpo._compat import codegen

PROBE_COLUMNS = 64
# The hidden size with which moving a row of logits costs as much as its two matmuls save.
MOVE_COST: dict[str, float] = {"cpu": 32, "cuda": 600}
# Rows moved at once when a chunk is packed where it lies.
BLOCK_ROWS = 256


def least_share(hidden: int, device: str) -> float:
    """Share of dead rows from which leaving them out pays."""
    cost = MOVE_COST.get(device, MOVE_COST["cuda"])
    return cost / (hidden + cost)


class _Watch:
    """What one program's last steps on CUDA looked like."""

    def __init__(self) -> None:
        self.share = 0.0
        self._pending: tuple[Tensor, torch.cuda.Event, int] | None = None

    def update(self) -> None:
        """Takes over a count that has arrived; never waits."""
        if self._pending is not None and self._pending[1].query():
            self.share = self._pending[0].item() / max(1, self._pending[2])
            self._pending = None

    def send(self, dead: Tensor, rows: int) -> None:
        """Starts the way of a count to the host."""
        if dead.device.type == "cpu":
            self.share = dead.item() / max(1, rows)
        elif self._pending is None:
            host = torch.empty((), dtype=dead.dtype, pin_memory=True)
            host.copy_(dead, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (host, event, rows)


_watches: dict[str, _Watch] = {}
_lock = threading.Lock()


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


class LiveRows:
    """Finds the live rows of the chunks in one run of a program; ``text`` is the program, ``n`` its rows, ``hidden``
    the columns of its gradients."""

    def __init__(self, text: str, device: torch.device, n: int, hidden: int) -> None:
        self._n = n
        self._least = least_share(hidden, device.type)
        self._on_cpu = self._looks = device.type == "cpu"
        self._watch: _Watch | None = None
        self._dead: Tensor | None = None
        self._finite: dict[int, bool] = {}
        if device.type == "cuda" and not codegen.capturing():
            with _lock:
                self._watch = _watches.setdefault(text, _Watch())
                self._watch.update()
                self._looks = self._watch.share >= self._least

    def of(self, value: Tensor, weights: Sequence[Tensor], operands: Sequence[Tensor]) -> Packing | None:
        """The live rows of a gradient ``value`` ``[n, V]``, or None to take all rows.

        ``weights`` are what it is multiplied with from the right, ``operands`` ``[n, H]`` what its transpose is."""
        if self._watch is None and not self._looks:
            return None
        if not self._looks or self._on_cpu:
            seemingly = value[:, :PROBE_COLUMNS].ne(0).any(1).logical_not_().sum()
            if not self._looks:
                self._dead = seemingly if self._dead is None else self._dead.add_(seemingly)
                return None
            if seemingly.item() < self._least * value.shape[0]:
                return None
        live = _largest(value).ne(0)
        for operand in operands:
            live.logical_or_(_largest(operand).isfinite().logical_not_())
        packing = Packing.of(live)
        dead = value.shape[0] - packing.order.shape[0]
        if self._watch is not None:
            self._dead = torch.tensor(dead) if self._dead is None else self._dead.add_(dead)
        if dead < self._least * value.shape[0] or not all(map(self._is_finite, weights)):
            return None
        return packing

    def _is_finite(self, weight: Tensor) -> bool:
        key = id(weight)
        if key not in self._finite:
            self._finite[key] = bool(torch.linalg.vector_norm(weight, math.inf).isfinite())
        return self._finite[key]

    def finish(self) -> None:
        """After the last chunk: what this step found decides how the next looks."""
        if self._watch is not None and self._dead is not None:
            with _lock:
                self._watch.send(self._dead, self._n)


def _in_words(x: Tensor) -> Tensor:
    """The memory of contiguous rows as the largest integers that it divides into: CUDA moves one at a time."""
    for word in (torch.int64, torch.int32):
        bytes_before = x.storage_offset() * x.element_size()
        if x.shape[1] * x.element_size() % word.itemsize == 0 and bytes_before % word.itemsize == 0:
            return x.view(word)
    return x


def _largest(x: Tensor) -> Tensor:
    """``[n]``: the largest magnitude of each row; nan where it has one."""
    return torch.linalg.vector_norm(x, math.inf, dim=1)
