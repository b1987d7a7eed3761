"""Rows without a gradient: padding, masked and clipped tokens, groups without an advantage.

The gradient of such a row's logits is exactly zero, all of it, so it adds nothing to the gradient of the weight and its
own gradient of hidden is zero.  The matmuls of a chunk run over the other rows alone.  Nothing is approximated, and what
is not finite stays so: a row whose hidden state has a nan or an infinity counts as live (0 * inf is nan), and with such a
weight every row does.

Which rows are live is known on the device only once the chunk's gradient is.  A CPU looks at once.  CUDA has to wait for
the answer, so it first watches: a few columns of each row say, a step later and without waiting, how many rows seem
dead.  Only where they were many does a step wait for each chunk's answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_grpo._compat import codegen

PROBE_COLUMNS = 64
# Dead rows from which compaction pays, as a share of a chunk's rows.
LEAST_SHARE = 1 / 16
# Rows moved at once when a chunk is compacted where it lies.
BLOCK_ROWS = 256


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
        if self._pending is None:
            host = torch.empty((), dtype=dead.dtype, pin_memory=True)
            host.copy_(dead, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (host, event, rows)


_watches: dict[str, _Watch] = {}
_lock = threading.Lock()


class LiveRows:
    """Finds and packs the live rows of one run of a program; ``text`` is the program, ``n`` its rows."""

    def __init__(self, text: str, device: torch.device, n: int) -> None:
        self._n = n
        self._looks = device.type == "cpu"
        self._watch: _Watch | None = None
        self._dead: Tensor | None = None
        self._finite: dict[int, bool] = {}
        if device.type == "cuda" and not codegen.capturing():
            with _lock:
                self._watch = _watches.setdefault(text, _Watch())
                self._watch.update()
            self._looks = self._watch.share >= LEAST_SHARE

    def of(self, value: Tensor, weights: Sequence[Tensor], operands: Sequence[Tensor]) -> Tensor | None:
        """Positions of the live rows of a gradient ``value`` ``[n, V]``, or None to take all rows.

        ``weights`` are what it is multiplied with from the right, ``operands`` ``[n, H]`` what its transpose is."""
        if self._watch is None and not self._looks:
            return None
        if not self._looks or value.device.type == "cpu":
            seemingly = value[:, :PROBE_COLUMNS].ne(0).any(1).logical_not_().sum()
            if not self._looks:
                self._dead = seemingly if self._dead is None else self._dead.add_(seemingly)
                return None
            if seemingly.item() < LEAST_SHARE * value.shape[0]:
                return None
        live = _largest(value).ne_(0)
        for operand in operands:
            live.logical_or_(_largest(operand).isfinite().logical_not_())
        rows = live.to(torch.bool).nonzero().squeeze(1)
        dead = value.shape[0] - rows.shape[0]
        if self._watch is not None:
            self._dead = dead + (0 if self._dead is None else self._dead)
        if dead < LEAST_SHARE * value.shape[0] or not all(map(self._is_finite, weights)):
            return None
        return rows

    def _is_finite(self, weight: Tensor) -> bool:
        key = id(weight)
        if key not in self._finite:
            self._finite[key] = bool(torch.linalg.vector_norm(weight, math.inf).isfinite())
        return self._finite[key]

    def finish(self) -> None:
        """After the last chunk: what this step found decides how the next looks."""
        if self._watch is None or self._dead is None:
            return
        if isinstance(self._dead, Tensor):
            self._watch.send(self._dead, self._n)
        else:
            self._watch.share = self._dead / max(1, self._n)


def _largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, math.inf, dim=1)


def pack(value: Tensor, rows: Tensor, in_place: bool) -> Tensor:
    """``value[rows]`` for ascending ``rows``; ``in_place`` packs them to the front of ``value``'s own memory."""
    if not in_place:
        return value.index_select(0, rows)
    count = rows.shape[0]
    for start in range(0, count, BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        value[start : start + block.shape[0]] = value.index_select(0, block)  # reads at or after where it writes
    return value[:count]
