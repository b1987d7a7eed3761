"""Which chunk bodies one program a row can run, and in which passes over the row.

A body is traced to a graph in which each value is either one number a row (*row*) or one a column (*wide*).  A pass
reads the row once and reduces wide values; between passes there is only arithmetic on numbers.  ``need`` is the number
of passes that must be over before a value can be computed: 0 for the logits and what is pointwise in them, and for a
reduction one more than its source's.  A sum of ``exp(y - max(y))`` is kept online beside the maximum, so it needs no
pass more than that.  Wide values are computed again in each pass that asks for them: only numbers outlive a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.fx as fx

from .._compat import codegen
from ..graph import aten, prims
from ..seam.expressions import Unsupported, held, supported

MOST_PASSES = 3
"""Passes that reduce; beyond, reading the row again costs more than it saves."""

Kind = Literal["max", "min", "sum", "mean"]
Input = Literal["syms", "logits", "rows", "whole"]
_INPUTS: tuple[Input, ...] = ("syms", "logits", "rows", "whole")
_REDUCTIONS: dict[Any, Kind] = {
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.sum.dim_IntList: "sum",
    aten.mean.dim: "mean",
}
VIEWS = {
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
}


class Unfit(Exception):
    """The body is not one for a row kernel; the message says why."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An input of the body: ``place`` counts among those of its kind that the body uses."""

    kind: Input
    place: int


@dataclasses.dataclass(frozen=True)
class Reduction:
    """``node`` reduces ``source`` over the columns.

    ``sums``, of a maximum: the sums of ``exp(source - node)`` kept beside it; the flag says that an infinite maximum
    was replaced by 0 before it was subtracted, as logsumexp does.
    """

    node: fx.Node
    kind: Kind
    source: fx.Node
    sums: tuple[tuple[fx.Node, bool], ...] = ()


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """A body as passes over a row of ``columns`` columns.

    ``nodes``   what must be computed, in order
    ``leaves``  the inputs among them
    ``wide``    the nodes with one value a column; the others have one a row
    ``need``    of each node, see the module
    ``passes``  the reductions of each pass
    ``outputs`` the values that were asked for, in order
    ``holds``   whether the plan is right for a row count and integers
    """

    columns: int
    nodes: tuple[fx.Node, ...]
    leaves: dict[fx.Node, Leaf]
    wide: frozenset[fx.Node]
    need: dict[fx.Node, int]
    passes: tuple[tuple[Reduction, ...], ...]
    outputs: tuple[fx.Node, ...]
    holds: Callable[[Sequence[int]], bool]

    def reduced(self) -> set[fx.Node]:
        """The nodes that passes give."""
        found = [r for some in self.passes for r in some]
        return {r.node for r in found} | {node for r in found for node, _ in r.sums}

    def wide_before(self, targets: Sequence[fx.Node]) -> list[fx.Node]:
        """The wide nodes that ``targets`` are computed from, and they themselves, in order."""
        found: set[fx.Node] = set()
        work = [t for t in targets if t in self.wide]
        while work:
            node = work.pop()
            if node not in found:
                found.add(node)
                work += [a for a in node.all_input_nodes if a in self.wide]
        return [n for n in self.nodes if n in found]


def through_views(node: Any) -> Any:
    """What a view shows; ``node`` itself where it is none."""
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    return node


def recognise(
    body: Callable[..., Sequence[Any]],
    symbols: Sequence[tuple[str, int]],
    specs: Sequence[codegen.TensorSpec],
    counts: tuple[int, int, int, int],
) -> RowPlan:
    """The plan of ``body(n, *syms, *logits, *rows, *whole)``, whose tensors are as ``specs`` say.

    ``symbols`` are the row count and the integers, with an example of each; ``counts`` says how many integers, logits,
    rows and whole tensors there are.  Raises Unfit.
    """
    try:
        graph, n, holds = codegen.trace_body(body, symbols, specs)
    except Exception as error:
        raise Unfit(f"the body cannot be traced: {type(error).__name__}: {error}") from error
    return _Recogniser(graph, n, counts, specs).plan(holds)


class _Recogniser:
    def __init__(
        self, graph: fx.Graph, n: Any, counts: tuple[int, int, int, int], specs: Sequence[codegen.TensorSpec]
    ) -> None:
        self.graph, self.n = graph, n
        widths = {spec.shape[1] for spec in specs[: counts[1]]}
        if len(widths) != 1 or not isinstance(columns := widths.pop(), int):
            raise Unfit("there is not one vocabulary that all logits have")
        self.columns = columns
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        names = [Leaf(kind, place) for kind, count in zip(_INPUTS, counts) for place in range(count)]
        self.row_count = placeholders[0]
        self.leaves = dict(zip(placeholders[1:], names, strict=True))
        self.wide: set[fx.Node] = set()
        self.need: dict[fx.Node, int] = {}
        self.passes: list[dict[fx.Node, Reduction]] = []

    def plan(self, holds: Callable[[Sequence[int]], bool]) -> RowPlan:
        outputs = list(next(n for n in self.graph.nodes if n.op == "output").args[0])
        nodes = self._needed(outputs)
        for node in nodes:
            self._place(node)
        if not self.passes:
            raise Unfit("nothing is reduced: generated code reads a row once as well")
        if len(self.passes) > MOST_PASSES:
            raise Unfit(f"{len(self.passes)} passes over a row, each reading what the one before reduced")
        return RowPlan(
            self.columns,
            tuple(nodes),
            {node: leaf for node, leaf in self.leaves.items() if node in set(nodes)},
            frozenset(self.wide),
            self.need,
            tuple(tuple(some.values()) for some in self.passes),
            tuple(outputs),
            holds,
        )

    def _needed(self, outputs: Sequence[Any]) -> list[fx.Node]:
        if not all(isinstance(out, fx.Node) for out in outputs):
            raise Unfit("an output is not computed")
        found: set[fx.Node] = set()
        work = list(outputs)
        while work:
            node = work.pop()
            if node not in found:
                found.add(node)
                # The number of rows occurs in shapes alone, which the kernel does not have.
                work += [a for a in _operands(node) if a is not self.row_count]
        return [node for node in self.graph.nodes if node in found]

    def _place(self, node: fx.Node) -> None:
        """Decides where a node is computed; its operands are placed already."""
        if node in self.leaves:
            self._place_leaf(node)
            return
        self._check_shape(node)
        operands = _operands(node)
        self.need[node] = max((self.need[a] for a in operands), default=0)
        target = node.target
        if target in _REDUCTIONS:
            self._reduce(node)
        elif target is aten.gather.default:
            self._check_gather(node)
        elif target is prims.iota.default:
            if node.args[0] != self.columns:
                raise Unfit("numbers that do not count the vocabulary")
            self.wide.add(node)
        elif target in VIEWS or supported(str(target)):
            if target not in VIEWS:
                self._check_dtypes(node)
            if any(a in self.wide for a in operands):
                self.wide.add(node)
        else:
            raise Unfit(f"{target} has no expression in a row kernel")

    def _place_leaf(self, node: fx.Node) -> None:
        leaf, value = self.leaves[node], node.meta["val"]
        self.need[node] = 0
        if leaf.kind == "syms":
            return
        self._check_dtypes(node)
        sizes = [size if isinstance(size, int) else None for size in value.shape]
        if leaf.kind == "logits":
            self.wide.add(node)
        elif sizes in ([None, self.columns], [self.columns], [1, self.columns]) and self.columns > 1:
            self.wide.add(node)
        elif sizes not in ([], [1], [1, 1], [None, 1]):
            raise Unfit(f"an input of shape {list(value.shape)}")

    def _check_shape(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
                raise Unfit(f"{node.target} computes with sizes")
            raise Unfit(f"{node.target} gives several values")
        *lead, last = [*value.shape] or [1]
        rows_fit = all((isinstance(size, int) and size == 1) or self._is_row_count(size) for size in lead)
        if len(lead) > 1 or not rows_fit:
            raise Unfit(f"{node.target} gives the shape {list(value.shape)}: rows are not apart")
        if not (isinstance(last, int) and last in (1, self.columns)):
            raise Unfit(
                f"{node.target} gives the shape {list(value.shape)}, which is neither a row value nor a vocabulary"
            )

    def _is_row_count(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and size.node.expr == self.n

    @staticmethod
    def _check_dtypes(node: fx.Node) -> None:
        try:
            held(node.meta["val"].dtype)
        except Unsupported as error:
            raise Unfit(str(error)) from None

    # Reductions

    def _reduce(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        kind = _REDUCTIONS[node.target]
        dims = node.args[1] if len(node.args) > 1 else None
        rank = source.meta["val"].dim()
        if rank != 2 or not isinstance(dims, (list, tuple)) or [d % rank for d in dims] != [1]:
            raise Unfit(f"{node.target} over dimensions {dims}")
        if kind in ("max", "min") and not source.meta["val"].dtype.is_floating_point:
            raise Unfit(f"{node.target} of integers")
        wanted, given = node.kwargs.get("dtype"), source.meta["val"].dtype
        if isinstance(wanted, torch.dtype) and wanted.itemsize < given.itemsize:
            raise Unfit(f"{node.target} that rounds what it sums")
        if source.meta["val"].shape[1] != self.columns:
            raise Unfit(f"{node.target} of one column")
        online = self._online(node, source) if kind == "sum" else None
        if online is not None:
            maximum, safe = online
            at = self.need[maximum] - 1
            known = self.passes[at][maximum]
            self.passes[at][maximum] = dataclasses.replace(known, sums=(*known.sums, (node, safe)))
            self.need[node] = self.need[maximum]
            return
        at = self.need[source]
        while len(self.passes) <= at:
            self.passes.append({})
        self.passes[at][node] = Reduction(node, kind, source)
        self.need[node] = at + 1

    def _online(self, node: fx.Node, source: fx.Node) -> tuple[fx.Node, bool] | None:
        """For a sum of ``exp(y - r)``: the maximum of y, and whether r is that or 0 where it is infinite."""
        exponential = through_views(source)
        if exponential.target is not aten.exp.default or exponential.meta["val"].dtype != node.meta["val"].dtype:
            return None
        difference = through_views(exponential.args[0])
        if difference.target is not aten.sub.Tensor or difference.kwargs or len(difference.args) != 2:
            return None
        y, r = map(through_views, difference.args)
        maximum, safe = _made_finite(r)
        if not isinstance(maximum, fx.Node) or maximum.target is not aten.amax.default:
            return None
        if through_views(maximum.args[0]) is not y or y.meta["val"].dtype not in (torch.float32, torch.float64):
            return None
        return (maximum, safe) if any(maximum in some for some in self.passes) else None

    def _check_gather(self, node: fx.Node) -> None:
        source, dim, index = node.args[:3]
        assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
        if dim not in (1, -1) or source.meta["val"].dim() != 2 or node.meta["val"].shape[1] != 1 or index in self.wide:
            raise Unfit("several elements of a row are gathered")
        if source.meta["val"].shape[1] != self.columns:
            raise Unfit("an element of something else than the vocabulary is gathered")


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a node's value depends on; the sizes that views and constants are given do not count."""
    if node.target in VIEWS:
        return [node.args[0]]  # type: ignore[list-item]
    if node.target in (aten.full.default, prims.iota.default):
        return [a for a in node.args[1:2] if isinstance(a, fx.Node)]
    return list(node.all_input_nodes)


def _made_finite(r: Any) -> tuple[Any, bool]:
    """``where(abs(m) == inf, 0, m)`` -> m; another value -> itself."""
    if not isinstance(r, fx.Node) or r.target is not aten.where.self:
        return r, False
    condition, zero, maximum = map(through_views, r.args)
    if not (
        isinstance(condition, fx.Node) and condition.target is aten.eq.Scalar and condition.args[1] == float("inf")
    ):
        return r, False
    size = through_views(condition.args[0])
    is_size = isinstance(size, fx.Node) and size.target is aten.abs.default and through_views(size.args[0]) is maximum
    is_zero = isinstance(zero, fx.Node) and zero.target in (aten.full.default, aten.scalar_tensor.default)
    if not is_size or not is_zero or zero.args[-1] != 0:
        return r, False
    return maximum, True
