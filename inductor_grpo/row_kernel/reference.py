"""What the kernel of a plan does, in plain torch: all rows at once, a tile of columns at a time.

Nothing runs it but tests.  Values have the dtypes of the graph, where the kernel holds half precision in float32
between two casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from .. import online
from ..graph import aten, prims
from .recognise import VIEWS, Reduction, RowPlan


def run(
    plan: RowPlan,
    logits: Sequence[Tensor],
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    syms: Sequence[int],
    columns: int,
) -> list[Tensor]:
    """The plan's outputs, ``[n, 1]`` or ``[n, V]``; a tile has ``columns`` columns."""
    return _Run(plan, {"logits": logits, "rows": rows, "whole": whole, "syms": syms}, columns).outputs()


class _Run:
    def __init__(self, plan: RowPlan, inputs: dict[str, Sequence[Any]], columns: int) -> None:
        self.plan, self.inputs = plan, inputs
        self.tiles = [range(a, min(a + columns, plan.columns)) for a in range(0, plan.columns, columns)]
        self.n = inputs["logits"][0].shape[0]
        self.device = inputs["logits"][0].device
        self.known: dict[fx.Node, Any] = {}
        """Row values, ``[n, 1]`` or of fewer rows."""

    def outputs(self) -> list[Tensor]:
        plan = self.plan
        for level, reductions in enumerate(plan.passes):
            self._row_values(level)
            running: list[list[Tensor]] = []
            for at in self.tiles:
                values = self._tile([r.source for r in reductions], torch.tensor(at, device=self.device))
                found = [_reduced(r, self._dense(values[r.source], len(at))) for r in reductions]
                pairs = zip(reductions, running, found)
                running = [online.merge(_kept(r), a, b) for r, a, b in pairs] if running else found
            for r, statistics in zip(reductions, running):
                self._finish(r, statistics)
        self._row_values(len(plan.passes))
        parts = [self._tile(plan.outputs, torch.tensor(at, device=self.device)) for at in self.tiles]
        return [
            torch.cat([self._dense(part[out], len(at)) for part, at in zip(parts, self.tiles)], 1)
            if out in plan.wide
            else self.known[out].expand(self.n, *out.meta["val"].shape[1:] or (1,))
            for out in plan.outputs
        ]

    def _dense(self, x: Tensor, columns: int) -> Tensor:
        return x.expand(self.n, columns)

    def _row_values(self, level: int) -> None:
        plan = self.plan
        reduced = plan.reduced()
        for node in plan.nodes:
            if node not in plan.wide and plan.need[node] == level and node not in reduced:
                if node.target is aten.gather.default:
                    self.known[node] = self._element(node)
                else:
                    self.known[node] = self._value(node, self.known, None)

    def _element(self, node: fx.Node) -> Tensor:
        """A wide value at one column a row: computed there alone."""
        source, index = node.args[0], self.known[node.args[2]].expand(self.n, 1)  # type: ignore[index]
        if not bool(((index >= 0) & (index < self.plan.columns)).all()):
            raise RuntimeError(f"index out of bounds: a label is not in [0, {self.plan.columns})")
        return self._tile([source], index)[source].expand(self.n, 1)  # type: ignore[list-item,index]

    def _tile(self, targets: Sequence[fx.Node], at: Tensor) -> dict[fx.Node, Any]:
        """The wide values that ``targets`` need, at the columns ``at``: ``[c]``, or one a row ``[n, 1]``."""
        values = dict(self.known)
        for node in self.plan.wide_before(targets):
            values[node] = self._value(node, values, at)
        return values

    def _value(self, node: fx.Node, values: dict[fx.Node, Any], at: Tensor | None) -> Any:
        leaf = self.plan.leaves.get(node)
        if leaf is not None:
            x = self.inputs[leaf.kind][leaf.place]
            if at is None:
                return x
            if leaf.kind == "whole":
                return x.reshape(-1)[at]
            return x.gather(1, at) if at.dim() == 2 else x[:, at]
        if node.target in VIEWS:
            shown = values[node.args[0]]  # type: ignore[index]
            return shown if at is not None else shown.reshape(-1, 1) if node.meta["val"].dim() else shown.reshape([])
        if node.target is prims.iota.default:
            return at * node.kwargs.get("step", 1) + node.kwargs.get("start", 0)  # type: ignore[operator]
        if node.target is aten.full.default:
            dims = [1] * len(node.args[0])  # type: ignore[arg-type]
            fill: Any = values.get(node.args[1], node.args[1])  # type: ignore[arg-type]
            return torch.full(dims, fill, dtype=node.meta["val"].dtype, device=self.device)
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _finish(self, r: Reduction, statistics: list[Tensor]) -> None:
        first = statistics[0]
        if r.kind == "mean":
            first = first / self.plan.columns
        self.known[r.node] = first.to(r.node.meta["val"].dtype)
        for node, safe in r.sums:
            fixed = statistics[1] if safe else torch.where(first.isinf(), torch.nan, statistics[1])
            self.known[node] = torch.where(first.isnan(), torch.nan, fixed)


def _kept(r: Reduction) -> str:
    return "softmax" if r.sums else {"mean": "sum"}.get(r.kind, r.kind)


def _reduced(r: Reduction, x: Tensor) -> list[Tensor]:
    if r.kind in ("sum", "mean"):
        dtype = r.node.meta["val"].dtype
        wide = torch.promote_types(x.dtype, torch.float32) if dtype.is_floating_point else dtype
        return [x.sum(1, keepdim=True, dtype=wide)]
    return online.of_tile(_kept(r), x)
