"""The row kernel of a chunk step: the body and what is stored of its values, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._compat import codegen
from ..program import Program
from .launch import RowKernel
from .recognise import Unfit
from .text import Store

if TYPE_CHECKING:
    from ..body import Plan, Uses


class ChunkKernel:
    """A chunk step (:func:`inductor_grpo.body.step`) as a row kernel.  Raises Unfit where there is none."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        uses: Uses,
        specs: Sequence[codegen.TensorSpec],
        syms: Sequence[int],
        hint: int,
    ) -> None:
        self.program, self.plan, self.uses = program, plan, uses
        self.ran = False
        """Whether it has run before, and so compiles."""
        self._known: dict[tuple[int, ...], bool] = {}
        if not program.projections:
            raise Unfit("there are no logits")
        placed = dict(plan.in_place)
        logits, device = specs[: len(program.projections)], specs[0].device
        counts = (len(uses.syms), len(logits), len(uses.rows), len(uses.whole))
        inputs, targets = specs[: sum(counts[1:])], specs[sum(counts[1:]) :]
        for position, spec in zip(plan.targets, targets, strict=True):
            if program.sinks[position].kind != "row" or spec.shape[1] != 1:
                raise Unfit("something else than one number a row, or a gradient of logits, is returned")
        stores: list[Store | None] = [Store(spec.dtype) for spec in targets]
        for operand in plan.operands:
            place = placed.get(operand)
            stores.append(None if place is None else Store(logits[place].dtype, place))
        symbols = [("n", hint), *((f"s{i}", value) for i, value in zip(uses.syms, syms, strict=True))]
        self.kernel = RowKernel(self._values, symbols, inputs, counts, stores, device)
        columns = [out.meta["val"].shape[-1] if out.meta["val"].dim() else 1 for out in self.kernel.plan.outputs]
        if any(c != 1 for c in columns[: len(targets)]):
            raise Unfit("a row value has several columns")

    def _values(self, n: Any, *args: Any) -> list[Any]:
        """The values of targets and operands, from a flat argument list."""
        from ..body import Placed, load

        parts: list[Sequence[Any]] = []
        start = 0
        for count in (len(self.uses.syms), len(self.program.projections), len(self.uses.rows), len(self.uses.whole)):
            parts.append(args[start : start + count])
            start += count
        syms, logits, rows, whole = parts
        values = load(self.program.body)(
            n, logits, Placed(self.uses.rows, rows), Placed(self.uses.whole, whole), Placed(self.uses.syms, syms)
        )
        found = [values[self.program.sinks[position].value] for position in self.plan.targets]
        width = logits[0].shape[1]
        return found + [torch.ops.aten.expand.default(values[place], [n, width]) for place in self.plan.operands]

    def holds(self, n: int, syms: Sequence[int]) -> bool:
        """Whether the kernel is right for so many rows; one row runs the code of two, as in a compiled body."""
        values = (max(n, 2), *syms)
        if values not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[values] = self.kernel.plan.holds(values)
        return self._known[values]

    def run(
        self,
        n: int,
        logits: Sequence[Tensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        syms: Sequence[int],
        targets: Sequence[Tensor],
        skips: bool = False,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Runs one chunk; what is returned first is as of :func:`inductor_grpo.body.step`.

        Then come the live rows of each operand, as of :class:`RowKernel`, None where the kernel cannot tell."""
        own: list[Tensor | None] = []
        for store in self.kernel.stores[len(targets) :]:
            shape = (n, logits[0].shape[1])
            fresh = store.buffer is None
            own.append(torch.empty(shape, dtype=store.dtype, device=logits[0].device) if fresh else None)
        live = self.kernel(n, syms, logits, rows, whole, [*targets, *(x for x in own if x is not None)], skips)
        known = dict(zip(self.kernel.filled, live, strict=True))
        self.ran = True
        return own, [known.get(i) for i in range(len(targets), len(targets) + len(own))]
