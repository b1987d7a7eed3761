"""Rows without a gradient: padding, masked and clipped tokens, groups without an advantage.

The gradient of such a row's logits is exactly zero, all of it, so it adds nothing to the gradient of the weight and its
own gradient of hidden is zero.  The matmuls of a chunk run over the other rows alone.  Nothing is approximated, and
what is not finite stays so: a row whose hidden state has a nan or an infinity counts as live (0 * inf is nan), and with
such a weight every row does.

Which rows are live is known on the device only once the chunk's gradient is.  A CPU looks at once.  CUDA has to wait
for the answer, so it first watches: a row kernel, or a few columns of each row, say a step later and without waiting
how many rows seem dead.  Only where they were many does a step wait for each chunk's answer, and rows move meanwhile.

A row kernel says of each row whether its gradient is zero and its logits finite (:mod:`.row_kernel.live`), so that
neither the gradient nor hidden nor the weight is read for this (:func:`proven`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from inductor_grpo import packing
from inductor_grpo._compat import codegen
from inductor_grpo.packing import DevicePacking, Packing
from inductor_grpo.program import Program

PROBE_COLUMNS = 64
# The hidden size with which moving a row of logits costs as much as its two matmuls save.
MOVE_COST: dict[str, float] = {"cpu": 32, "cuda": 600}


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


class LiveRows:
    """Finds the live rows of the chunks in one run of a program; ``text`` is the program, ``n`` its rows, ``hidden``
    the columns of its gradients."""

    def __init__(self, text: str, device: torch.device, n: int, hidden: int) -> None:
        self._n = n
        self._least = least_share(hidden, device.type)
        self._looks = device.type == "cpu"
        self._on_device = packing.on_device(device)
        self._watch: _Watch | None = None
        self._dead: Tensor | None = None
        self._finite: dict[int, bool] = {}
        if device.type == "cuda" and not codegen.capturing():
            with _lock:
                self._watch = _watches.setdefault(text, _Watch())
                self._watch.update()
                self._looks = self._watch.share >= self._least

    @property
    def zeroes(self) -> bool:
        """Whether :meth:`pack` makes each dead row zero that is not left out, whatever its memory holds.

        It does for a gradient of its own memory with known live rows, when what it is multiplied with is finite for
        each dead row."""
        return self._looks and self._on_device

    def pack(
        self,
        value: Tensor,
        owned: bool,
        weights: Sequence[Tensor],
        operands: Sequence[Tensor],
        live: Tensor | None = None,
    ) -> tuple[Tensor, Packing | DevicePacking | None]:
        """A gradient ``value`` ``[n, V]`` without rows that are dead, and how they were left out; None: all are there.

        ``weights`` are what it is multiplied with from the right, ``operands`` ``[n, H]`` what its transpose is, in so
        far as dead rows do not prove them finite.  ``live``, int8 ``[n]``, is 0 where the gradient is known to be zero;
        without it the gradient is read.  With ``owned`` its memory may be overwritten."""
        if not self._may_pack(value, live):
            return value, None
        if live is None or operands:
            live = (_largest(value) if live is None else live).ne(0)
            for operand in operands:
                live.logical_or_(_largest(operand).isfinite().logical_not_())
        if self._on_device:
            return self._pack_on_device(value, owned, weights, live)
        found = Packing.of(live)
        dead = value.shape[0] - found.order.shape[0]
        self._add(dead)
        if dead < self._least * value.shape[0] or not all(map(self._is_finite, weights)):
            return value, None
        return (found.rows_in_place(value) if owned else found.rows(value)), found

    def _may_pack(self, value: Tensor, live: Tensor | None) -> bool:
        """Whether the live rows are to be found.  CUDA that only watches counts what seems dead, and a CPU looks at
        some columns before it reads all."""
        if self._watch is None and not self._looks:
            return False
        if self._looks and (self._on_device or value.device.type != "cpu"):
            return True
        is_live = value[:, :PROBE_COLUMNS].ne(0).any(1) if live is None else live.ne(0)
        seemingly = is_live.logical_not_().sum()
        if not self._looks:
            self._dead = seemingly if self._dead is None else self._dead.add_(seemingly)
            return False
        return seemingly.item() >= self._least * value.shape[0]

    def _pack_on_device(
        self, value: Tensor, owned: bool, weights: Sequence[Tensor], live: Tensor
    ) -> tuple[Tensor, DevicePacking | None]:
        if not all(map(self._is_finite, weights)):
            return value, None
        found = DevicePacking(live.view(torch.int8), math.ceil(self._least * value.shape[0]))
        if owned:
            found.pack(value)  # runs while the host waits for the counts
        alive, kept = found.counts[:2]
        self._add(value.shape[0] - alive)
        if kept == value.shape[0]:
            return value, None
        return (found.rows_in_place(value) if owned else found.rows(value)), found

    def _add(self, dead: int) -> None:
        if self._watch is not None:
            self._dead = torch.tensor(dead) if self._dead is None else self._dead.add_(dead)

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


def proven(
    program: Program, rows: Sequence[Tensor], whole: Sequence[Tensor], checked: Collection[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Positions of the row and of the whole tensors that are finite as far as a row without a gradient reads them, if
    the logits of each such row are finite; ``checked``: the projections whose logits were looked at.

    An element of logits is ``sum_k x[k] * w[k, v]``, a bias added or not.  Where some x[k] is a nan or an infinity, so
    is its product with any number, zero too (then a nan); so is a sum with such a term, and what it is rounded to.  A
    row of finite logits therefore has a finite x, and the same of w[k, v]: as each column is in the row, the whole
    weight is finite.  The converse does not hold (a finite sum may overflow), so a row may needlessly count as live.

    The logits must be as the matmul gave them: nothing masked or scaled.  The weight of a gradient product counts where
    it is the same memory as a projection's, and hidden likewise.
    """
    used = [program.projections[place] for place in checked]
    hidden = {i for i, t in enumerate(rows) if any(_same(t, rows[p.hidden]) for p in used)}
    weights = [whole[p.weight] for p in used]
    return frozenset(hidden), frozenset(
        i for i, t in enumerate(whole) if t.dim() == 2 and any(_same(t, w) or _same(t.t(), w) for w in weights)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same memory in the same way."""
    if a is b:
        return True
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _largest(x: Tensor) -> Tensor:
    """``[n]``: the largest magnitude of each row; nan where it has one."""
    return torch.linalg.vector_norm(x, math.inf, dim=1)
