"""What a row kernel tells of its rows beside their values: which of them are live.

Of each gradient that it writes, the kernel writes a byte a row: 0 where all elements are zero and the row's logits are
all finite, as the matmul gave them.  Both come from what it reads and writes anyway.  That logits are finite proves
that what they were made of is, see :func:`inductor_grpo.live_rows.proven`.

Bits of the gradients are or-ed a lane, the sign aside; for the logits, 0 * x is added up, which is 0 as long as every x
is finite.  A row whose gradient is known to be zero before the last pass (:mod:`.zeros`) is left out of that pass where
the caller asks for it: its logits stay where its gradient would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from ..seam.expressions import Value, cast, held
from .recognise import RowPlan
from .zeros import LARGEST_EXPONENT, LARGEST_NUMBER, Condition, zero_when

_BITS = {"tl.float32": ("tl.int32", "0x7FFFFFFF"), "tl.float64": ("tl.int64", "0x7FFFFFFFFFFFFFFF")}


class Finite:
    """The test of the logits of a plan that writes ``outputs`` in its last pass; none where it writes none."""

    def __init__(self, plan: RowPlan, outputs: Sequence[fx.Node], columns: int) -> None:
        self.columns = columns
        self.first_read: dict[fx.Node, int] = {}
        """The pass that reads them first; logits of which only single elements are read are not among them."""
        passes = [[r.source for r in some] for some in plan.passes]
        for number, targets in enumerate([*passes, outputs] if outputs else []):
            for node in plan.wide_before(targets):
                if node in plan.leaves and plan.leaves[node].kind == "logits":
                    self.first_read.setdefault(node, number)
        self.places = {node: plan.leaves[node].place for node in self.first_read}

    def begin(self, number: int) -> list[str]:
        """Before a pass."""
        lines = []
        for node in self._read_in(number):
            full = f"tl.full([{self.columns}], 0, {held(node.meta['val'].dtype)})"
            lines += [f"zero{self.places[node]} = {full}", f"finite{self.places[node]} = {full}"]
        return lines

    def add(self, number: int, node: fx.Node, text: str) -> list[str]:
        """With a tile of one of the logits."""
        if self.first_read.get(node) != number:
            return []
        place = self.places[node]
        return [f"finite{place} = tl.fma({text}, zero{place}, finite{place})  # nan after an infinity or a nan"]

    def end(self, number: int) -> list[str]:
        """After a pass; the last one that reads logits first gives ``spoilt``, whether any were not finite."""
        if number != max(self.first_read.values(), default=-1):
            return []
        tests = " | ".join(f"(finite{p} != finite{p})" for p in self.places.values())
        return [f"spoilt = tl.max(({tests}).to(tl.int32), 0)"]

    def _read_in(self, number: int) -> list[fx.Node]:
        return [node for node, first in self.first_read.items() if first == number]


class Skipping:
    """Which rows the last pass may leave out: ``conditions``, or None where that is not known before it."""

    def __init__(self, plan: RowPlan, outputs: Sequence[fx.Node], finite: Finite) -> None:
        self.conditions: list[Condition] | None = None
        if not outputs or max(finite.first_read.values(), default=len(plan.passes)) >= len(plan.passes):
            return
        found: list[Condition] = []
        for out in outputs:
            some = zero_when(plan, out)
            if some is None:
                return
            found += some
        self.conditions = list(dict.fromkeys(found))

    def test(self, value_of: Callable[[fx.Node], Value]) -> str:
        """A row's test, from the texts of row values."""
        texts = ["(spoilt == 0)"]
        for condition in self.conditions or ():
            first, *others = (cast(value_of(node), node.meta["val"].dtype) for node in condition.values)
            texts.append(
                {
                    "zero": f"({first} == 0)",
                    "small": f"(tl.abs({first}) <= {LARGEST_NUMBER})",
                    "falls": f"({' - '.join([first, *others])} < {LARGEST_EXPONENT})",
                }[condition.kind]
            )
        return " & ".join(texts)


def begin_bits(i: int, value: torch.dtype, columns: int) -> str:
    """Before the last pass: no bit of output ``i`` is set."""
    kind = held(value)
    return f"bits{i} = tl.full([{columns}], 0, {_BITS[kind][0] if kind in _BITS else 'tl.int32'})"


def add_bits(i: int, value: Value, live: str) -> str:
    """With a tile of its elements; ``live`` masks those that are in the row."""
    kind, text = held(value.dtype), cast(value, value.dtype)
    bits = f"({text}).to({_BITS[kind][0]}, bitcast=True)" if kind in _BITS else f"({text} != 0).to(tl.int32)"
    return f"bits{i} = bits{i} | {f'tl.where({live}, {bits}, 0)' if live else bits}"


def end_bits(i: int, value: torch.dtype) -> str:
    """After it."""
    kind = held(value)
    any_bit = f"bits{i} & {_BITS[kind][1]}" if kind in _BITS else f"bits{i}"
    return f"tl.store(LIVE{i} + row, (tl.max((({any_bit}) != 0).to(tl.int32), 0) | spoilt).to(tl.int8))"


def dead(i: int) -> str:
    """For a row that is left out."""
    return f"tl.store(LIVE{i} + row, tl.full([], 0, tl.int8))"
