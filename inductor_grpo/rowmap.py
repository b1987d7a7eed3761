"""Selections of rows, as index maps.

``logits[:, :-1]``, a mask, a roll or a row loop selects rows of the logits.  A :class:`RowMap` carries such selections
down to the leaves of a region, where they select rows of hidden instead: slice(mm) becomes mm(slice), and rows that
nobody reads are never projected.  A step is any view-like operation, applied to an iota of the parent's row positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import torch
import torch.fx as fx

from .graph import GraphBuilder, Size, aten, hint, numel, same, same_sizes


@dataclasses.dataclass(frozen=True)
class Step:
    """Positions of the selected rows in the parent's rows.

    ``select`` maps positions ``[*parent]`` to those that are kept; two steps with the same ``key`` are the same
    selection.  ``span`` is set when rows ``start : start + length`` of dimension ``dim`` are kept.
    """

    key: Hashable
    parent: tuple[Size, ...] = dataclasses.field(compare=False)
    select: Callable[[GraphBuilder, fx.Node], fx.Node] = dataclasses.field(compare=False)
    span: Span | None = dataclasses.field(default=None, compare=False)
    inverse_of: Step | None = dataclasses.field(default=None, compare=False)

    def positions(self, b: GraphBuilder, device: torch.device) -> fx.Node:
        """``[m]`` int64: for each selected row its position among the parent's (for an inverse step: where it came
        from, 0 where it came from nowhere)."""
        if self.inverse_of is not None:
            return b.call(aten.clamp_min.default, self._origin(b, device), 0)
        iota = b.view(b.iota(numel(self.parent), device), self.parent)
        return b.view(self.select(b, iota), [-1])

    def present(self, b: GraphBuilder, device: torch.device) -> fx.Node:
        """``[m]`` bool, of an inverse step: the row was selected at all."""
        return b.call(aten.ge.Scalar, self._origin(b, device), 0)

    def _origin(self, b: GraphBuilder, device: torch.device) -> fx.Node:
        assert self.inverse_of is not None
        positions = self.inverse_of.positions(b, device)
        nowhere = b.full([numel(self.inverse_of.parent)], -1, torch.int64, device)
        counter = b.iota(positions.meta["val"].shape[0], device)
        return b.call(aten.index_put.default, nowhere, [positions], counter)

    def inverse(self, rows: tuple[Size, ...]) -> Step:
        """From the parent's rows back to the selected ones (``rows``); for selections without repeats."""
        return Step(("inverse", self.key), rows, lambda b, x: x, inverse_of=self)


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows ``start : start + length`` of dimension ``dim`` of the parent's row dimensions."""

    dim: int
    start: Size
    length: Size


@dataclasses.dataclass(frozen=True)
class RowMap:
    """A chain of selections, from a program's rows (first) to the rows of the node that is read (last)."""

    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> RowMap:
        """One selection further down; a selection after its own inverse is nothing (where the row is present)."""
        if self.steps and self.steps[-1].inverse_of is not None and self.steps[-1].inverse_of.key == step.key:
            return RowMap(self.steps[:-1])
        return RowMap((*self.steps, step))

    def positions(self, b: GraphBuilder, device: torch.device) -> fx.Node | None:
        """``[n]`` int64 row positions, or None for all rows in order."""
        index: fx.Node | None = None
        for step in self.steps:
            own = step.positions(b, device)
            index = own if index is None else b.take_rows(own, index)
        return index

    def rows_of(self, b: GraphBuilder, x: fx.Node) -> fx.Node:
        """Rows of ``x`` ``[N, ...]`` that the map selects."""
        positions = self.positions(b, x.meta["val"].device)
        return x if positions is None else b.take_rows(x, positions)


def partition(steps: list[Step], whole: tuple[Size, ...]) -> int | None:
    """The dimension along which the steps, in any order, cut rows ``whole`` into consecutive spans; None when they do
    not."""
    spans = []
    for step in steps:
        if step.span is None or not same_sizes(step.parent, whole):
            return None
        spans.append(step.span)
    at: Size = 0
    for span in sorted(spans, key=lambda s: hint(s.start)):
        if span.dim != spans[0].dim or not same(span.start, at):
            return None
        at = at + span.length
    return spans[0].dim if same(at, whole[spans[0].dim]) else None
