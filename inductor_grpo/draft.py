"""A chunk program while it is being written: an FX graph for the body, and what it reads and keeps.

Everything in a body is two-dimensional: ``[n, C]`` (dense), ``[n, 1]``, ``[1, C]``, ``[1, 1]``, or 0-dim where the
user's operand was 0-dim (type promotion differs).  Views, permutes and symbolic shape arguments do not survive into it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.fx as fx

from .graph import Size, map_args
from .program import Program, Projection, Sink, SinkKind
from .report import Rejection
from .rowmap import RowMap


@dataclasses.dataclass(frozen=True)
class RowInput:
    """Rows of ``node`` ``[N, c]`` (outer graph) chosen by ``map``."""

    node: fx.Node
    map: RowMap


@dataclasses.dataclass
class Output:
    """A value of the body and what becomes of it; see :class:`inductor_grpo.program.Sink`."""

    kind: SinkKind
    value: fx.Node
    columns: int | fx.Node
    dtype: torch.dtype
    operand: RowInput | fx.Node | None = None
    casts: tuple[torch.dtype, ...] = ()
    """Conversions still to be applied to the value, after terms of the same sum have been added up."""


@dataclasses.dataclass
class Unless:
    """A backward is not run where all tangents ``others`` are zero: its outputs, by place, are those of ``forward`` at
    ``ready``, times ``factor``."""

    forward: Draft
    ready: dict[int, int]
    factor: fx.Node
    others: list[fx.Node]


class Draft:
    """The program of one row space at one depth."""

    def __init__(self, rows: list[Size], depth: int, origin: fx.Node) -> None:
        self.rows = rows
        """Sizes of the row dimensions; the program has their product of rows."""
        self.depth = depth
        self.origin = origin
        """A node of the region that it computes."""
        self.patterns: list[str] | None = None
        """The patterns that took part when it runs over tiles of the vocabulary; None when it runs over chunks of
        rows."""
        self.group: int | fx.Node = 1
        """Chunks are whole groups of so many rows."""
        self.kept_rows: int | fx.Node = 0
        """Logits of so many rows are kept for, or taken over from, the program of another schedule stage."""
        self.keeps: list[int] = []
        self.reuses: list[tuple[int, fx.Node]] = []
        self.takes_over = False
        """The memory of the reused logits too, which nobody reads after this program."""
        self.key = ""
        """Not empty: it makes the outputs ``spare`` when they are of use, and says whether it did."""
        self.spare: set[int] = set()
        self.unless: Unless | None = None
        """What stands for its outputs most of the time."""
        self.graph = fx.Graph()
        self.n, self._logits, self._rows, self._whole, self._syms = (
            self.graph.placeholder(name) for name in ("n", "logits", "rows", "whole", "syms")
        )
        self.row_inputs: dict[RowInput, int] = {}
        self.whole_inputs: dict[fx.Node, int] = {}
        self.sizes: dict[fx.Node, int] = {}
        self.projections: dict[Projection, fx.Node] = {}
        self.outputs: list[Output] = []
        self.values: dict[Any, fx.Node] = {}
        """Body values by (outer node, row map)."""
        self._known: dict[Any, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the body; the same call is made once."""
        key = (target, repr(args), repr(sorted(kwargs.items())))
        if key not in self._known:
            self._known[key] = self.graph.call_function(target, args, kwargs)
        return self._known[key]

    def row(self, node: fx.Node, rowmap: RowMap) -> fx.Node:
        """``[n, c]``: the chunk's rows of an outer ``[N, c]`` tensor."""
        return self.call(operator.getitem, self._rows, self.row_index(node, rowmap))

    def row_index(self, node: fx.Node, rowmap: RowMap) -> int:
        """The place of a row input, added when new."""
        return self.row_inputs.setdefault(RowInput(node, rowmap), len(self.row_inputs))

    def whole(self, node: fx.Node) -> fx.Node:
        """A tensor that every chunk reads whole."""
        return self.call(operator.getitem, self._whole, self.whole_index(node))

    def whole_index(self, node: fx.Node) -> int:
        """The place of a whole input, added when new."""
        return self.whole_inputs.setdefault(node, len(self.whole_inputs))

    def size(self, dim: int | fx.Node) -> int | fx.Node:
        """A size inside the body: a number, or a symbolic size handed in."""
        if isinstance(dim, int):
            return dim
        return self.call(operator.getitem, self._syms, self.sizes.setdefault(dim, len(self.sizes)))

    def project(self, projection: Projection) -> fx.Node:
        """``[n, V]`` logits of a head."""
        if projection not in self.projections:
            index = len(self.projections)
            self.projections[projection] = self.call(operator.getitem, self._logits, index)
        return self.projections[projection]

    def dense(self, x: fx.Node, columns: int | fx.Node) -> fx.Node:
        """``[n, columns]`` from any canonical form."""
        return self.call(torch.ops.aten.expand.default, x, [self.n, self.size(columns)])

    def keep(self, output: Output) -> int:
        """Adds an output and returns its place."""
        self.outputs.append(output)
        return len(self.outputs) - 1

    def absorb(self, other: Draft, rows: list[RowInput] | None = None, order: Sequence[int] | None = None) -> list[int]:
        """Takes over the body and the outputs of another program, reading ``rows`` in the place of its own row inputs;
        returns the new places of its outputs.  With ``order`` the outputs come in that order, and what they need in
        the order in which they need it."""
        rows = list(other.row_inputs) if rows is None else rows
        outputs = [other.outputs[i] for i in order] if order is not None else other.outputs
        nodes = list(other.graph.nodes) if order is None else needed_by([out.value for out in outputs])
        self.group = self.group if other.group == 1 else other.group
        env: dict[fx.Node, fx.Node] = {other.n: self.n}
        names: dict[str, list[Any]] = {"logits": list(other.projections), "rows": rows}
        names.update(whole=list(other.whole_inputs), syms=list(other.sizes))
        moved: dict[Any, Any] = dict(zip(other.row_inputs, rows))
        for node in nodes:
            if node.op == "placeholder":
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and source.op == "placeholder":
                place: Any = node.args[1]
                env[node] = self._take(source.name, names[source.name][place], names)
                continue
            args, kwargs = map_args(node, env.__getitem__)
            env[node] = self.call(node.target, *args, **kwargs)
        return [
            self.keep(dataclasses.replace(out, value=env[out.value], operand=moved.get(out.operand, out.operand)))
            for out in outputs
        ]

    def _take(self, kind: str, item: Any, names: dict[str, list[Any]]) -> fx.Node:
        if kind == "rows":
            return self.row(item.node, item.map)
        if kind == "whole":
            return self.whole(item)
        if kind == "syms":
            return cast(fx.Node, self.size(item))
        hidden: RowInput = names["rows"][item.hidden]
        bias = None if item.bias is None else self.whole_index(names["whole"][item.bias])
        weight = self.whole_index(names["whole"][item.weight])
        return self.project(Projection(self.row_index(hidden.node, hidden.map), weight, bias))

    def program(self, accumulate: str, places: list[int] | None = None) -> Program:
        """The finished program of all outputs, or of those at ``places``; ``accumulate`` is "float32" or "param"."""
        values: list[fx.Node] = []
        sinks = []
        for out in self.outputs if places is None else [self.outputs[p] for p in places]:
            value = out.value
            for dtype in out.casts:
                value = self.call(torch.ops.prims.convert_element_type.default, value, dtype)
            if value not in values:
                values.append(value)
            sinks.append(self._sink(out, values.index(value), accumulate))
        body = print_function(self.graph, "body", values)
        reuses = tuple((place, self.whole_index(node)) for place, node in self.reuses)
        group, kept = self._number(self.group), self._number(self.kept_rows)
        keeps, takes_over = tuple(self.keeps), self.takes_over and bool(reuses)
        projections = tuple(self.projections)
        outputs = range(len(self.outputs)) if places is None else places
        spare = tuple(i for i, place in enumerate(outputs) if place in self.spare)
        return Program(
            projections, body, tuple(sinks), group, kept, keeps, reuses, takes_over, key=self.key, spare=spare
        )

    def _sink(self, out: Output, value: int, accumulate: str) -> Sink:
        operand = None
        if isinstance(out.operand, RowInput):
            operand = self.row_index(out.operand.node, out.operand.map)
        elif out.operand is not None:
            operand = self.whole_index(out.operand)
        columns = self._number(out.columns)
        dtype = str(out.dtype).removeprefix("torch.")
        running = (
            "float32" if accumulate == "float32" and out.dtype.itemsize < 4 and out.dtype.is_floating_point else dtype
        )
        return Sink(out.kind, value, operand, columns, dtype, running)

    def _number(self, size: int | fx.Node) -> int | str:
        return size if isinstance(size, int) else f"s{self.sizes.setdefault(size, len(self.sizes))}"


def needed_by(values: Sequence[fx.Node]) -> list[fx.Node]:
    """The values and all that they are computed from, each after its operands, the first value's first."""
    found: dict[fx.Node, None] = {}
    work = list(reversed(values))
    while work:
        node = work[-1]
        missing = [a for a in node.all_input_nodes if a not in found]
        if missing and node not in found:
            work += reversed(missing)
        else:
            found.setdefault(node)
            work.pop()
    return list(found)


def print_function(graph: fx.Graph, name: str, values: list[fx.Node]) -> str:
    """The source of a function of the graph's placeholders that returns ``values``; it needs only torch, operator, inf
    and nan, computes nothing that is not asked for, and frees each value after its last use.

    Raises Rejection for an argument that has no text."""
    live: set[fx.Node] = set(values)
    for node in reversed(graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    nodes = [n for n in graph.nodes if n in live and n.op != "placeholder"]
    names = {n: n.name for n in graph.nodes if n.op == "placeholder"}
    names.update({n: f"v{i}" for i, n in enumerate(nodes)})
    last_use = {a: n for n in nodes for a in n.all_input_nodes}

    def text(x: Any) -> str:
        if isinstance(x, fx.Node):
            return names[x]
        if isinstance(x, (list, tuple)):
            inner = ", ".join(map(text, x))
            return f"[{inner}]" if isinstance(x, list) else f"({inner},)"
        if isinstance(x, torch.device):
            return f"torch.device({str(x)!r})"
        if isinstance(x, float) and not math.isfinite(x):
            return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
        if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
            return repr(x)
        raise Rejection("INTERNAL", f"an argument of type {type(x).__name__} cannot be written into a chunk program")

    parameters = ", ".join(n.name for n in graph.nodes if n.op == "placeholder")
    lines = [f"def {name}({parameters}):"]
    for node in nodes:
        if node.target is operator.getitem:
            lines.append(f"    {names[node]} = {text(node.args[0])}[{text(node.args[1])}]")
        else:
            given = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            target: Any = node.target
            is_operation = isinstance(target, torch._ops.OpOverload)
            function = f"torch.ops.{target}" if is_operation else f"operator.{target.__name__}"
            lines.append(f"    {names[node]} = {function}({', '.join(given)})")
        dead = [
            names[a] for a in node.all_input_nodes if last_use[a] is node and a.op != "placeholder" and a not in values
        ]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return {text(tuple(values))}" if values else "    return ()")
    return "\n".join(lines) + "\n"
