"""Reading and extending the joint graph: shapes, symbolic sizes, new nodes with their fake values.

Sizes may be symbolic and are never compared in a way that adds a guard: two sizes are the same when that is statically
known, and otherwise they are taken to differ (which costs a rewrite, not a recompilation).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, cast

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.utils._pytree import tree_map

from ._compat import divided, fxgraph

aten = torch.ops.aten
prims = torch.ops.prims

Size = int | torch.SymInt
Dim = int | fx.Node
"""A size as an argument of a node: a number, or the node that computes it."""


def value(node: Any) -> Any:
    """The fake value of a node (None for anything else)."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def shape(node: Any) -> list[Size]:
    """The sizes of a tensor node; raises TypeError when it is not one."""
    val = value(node)
    if not isinstance(val, torch.Tensor):
        raise TypeError(f"{node} is not a tensor")
    return list(val.shape)


def is_tensor(node: Any) -> bool:
    """True for a node whose value is one tensor."""
    return isinstance(value(node), torch.Tensor)


def target_of(node: Any) -> Any:
    """What a call_function node calls; None for anything else."""
    return node.target if isinstance(node, fx.Node) and node.op == "call_function" else None


def same(a: Size, b: Size) -> bool:
    """Statically known to be equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if statically_known_true(sym_eq(a, b)):
        return True
    symbolic = a if isinstance(a, torch.SymInt) else b
    assert isinstance(symbolic, torch.SymInt)
    a, b = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (a, b))
    return divided.equal(symbolic.node.shape_env, a, b)


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """The same, of two lists."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))


def is_one(size: Size) -> bool:
    """Statically one."""
    return isinstance(size, int) and size == 1


def right_aligned(sizes: Sequence[Size], rank: int) -> list[Size]:
    """The sizes with ones before them, as broadcasting to ``rank`` dimensions reads them."""
    return [*[1] * (rank - len(sizes)), *sizes]


def numel(sizes: Iterable[Size]) -> Size:
    """Product of sizes; 1 for none."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def hint(size: Size) -> int:
    """The size seen while compiling; a large number for a size that only the data decides."""
    if isinstance(size, int):
        return size
    return fxgraph.size_hint(size, fxgraph.SIZE_OF_DATA)


def nbytes(node: fx.Node) -> int:
    """Bytes of a tensor node at the sizes seen while compiling."""
    val = value(node)
    return hint(numel(val.shape)) * val.element_size() if isinstance(val, torch.Tensor) else 0


def arg(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def node_arg(node: fx.Node, position: int) -> fx.Node:
    """An argument that is known to be a node."""
    return cast(fx.Node, node.args[position])


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node whose operator says what they are."""
    return cast("tuple[Any, ...]", node.args)


def map_args(node: fx.Node, f: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node with ``f(x)`` for every node ``x`` in them."""
    return cast("tuple[tuple[Any, ...], dict[str, Any]]", fx.map_arg((node.args, node.kwargs), f))


def ancestors(nodes: Iterable[fx.Node], among: Container[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes and all that they are computed from; only through nodes of ``among``, where that is given."""
    seen = set(nodes)
    work = list(seen)
    while work:
        for a in work.pop().all_input_nodes:
            if (among is None or a in among) and a not in seen:
                seen.add(a)
                work.append(a)
    return seen


def inputs_through_tuples(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads; for one result of an operation with several, what that operation reads."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and target_of(source) is not None and not is_tensor(source):
        return source.all_input_nodes
    return node.all_input_nodes


class GraphBuilder:
    """Adds nodes to a graph at its end, each with its fake value; reuses a node that computes the same.

    ``late`` are the nodes of the backward."""

    def __init__(self, graph: fx.Graph, late: set[fx.Node]) -> None:
        self.graph = graph
        self.output = next(n for n in reversed(graph.nodes) if n.op == "output")
        self._fake_mode = fxgraph.fake_mode_of(graph)
        self._symbols: dict[sympy.Expr, fx.Node] = {}
        self._known: dict[Any, fx.Node] = {}
        self._collect_symbols(late)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call_function node with its fake value; the same call is made once."""
        fill = _constant(args[0]) if target is aten.expand.default else None
        if fill is not None:
            # Inductor asks of an expanded constant whether it is contiguous, which a size without a value cannot tell.
            like = value(args[0])
            sizes = [
                known if dim == -1 else dim for dim, known in zip(args[1], right_aligned(like.shape, len(args[1])))
            ]
            return self.full([self.size_of(size) for size in sizes], fill, like.dtype, like.device)
        key = (target, _freeze(args), _freeze(kwargs))
        found = self._known.get(key)
        if found is not None:
            return found
        with self.graph.inserting_before(self.output):
            node = self.graph.call_function(target, args, kwargs)
        values = tree_map(lambda x: value(x) if isinstance(x, fx.Node) else x, (args, kwargs))
        with self._fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        self._known[key] = node
        return node

    # The few operations that the rewrite needs outside of the chunk programs, in Inductor's decomposed op set.

    def view(self, x: fx.Node, sizes: Sequence[Size]) -> fx.Node:
        """``x`` in another shape (a copy where its strides need one)."""
        if same_sizes(shape(x), sizes):
            return x
        return self.call(aten.reshape.default, x, self.dims(sizes))

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        """``x`` with its dimensions in another order."""
        if list(order) == list(range(len(order))):
            return x
        if target_of(x) is aten.permute.default and len(order) == 2:
            return node_arg(x, 0)
        return self.call(aten.permute.default, x, list(order))

    def iota(self, size: Size, device: torch.device) -> fx.Node:
        """``0 .. size-1`` as int64."""
        return self.call(
            prims.iota.default, self.dim(size), start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
        )

    def full(self, sizes: Sequence[Size], fill: Any, dtype: torch.dtype, device: torch.device) -> fx.Node:
        """A constant tensor."""
        dims = self.dims(sizes)
        return self.call(aten.full.default, dims, fill, dtype=dtype, device=device, pin_memory=False)

    def take_rows(self, x: fx.Node, index: fx.Node) -> fx.Node:
        """``x[index]`` along dimension 0."""
        return self.call(aten.index.Tensor, x, [index])

    def slice(self, x: fx.Node, dim: int, start: Size, end: Size) -> fx.Node:
        """``x`` narrowed to ``start:end`` along ``dim``."""
        return self.call(aten.slice.Tensor, x, dim, self.dim(start), self.dim(end))

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        """The parts joined along ``dim``; the original, when they are the pieces it was cut into."""
        if len(parts) == 1:
            return parts[0]
        return self.uncut(parts, dim) or self.call(aten.cat.default, list(parts), dim)

    def uncut(self, parts: Sequence[fx.Node], dim: int) -> fx.Node | None:
        """The tensor that consecutive slices along ``dim`` are all of, or None."""
        base: fx.Node | None = None
        at: Size = 0
        for part in parts:
            if (
                target_of(part) is not aten.slice.Tensor
                or arg(part, 1, "dim", 0) != dim
                or arg(part, 4, "step", 1) != 1
            ):
                return None
            start, size = self.size_of(arg(part, 2, "start", 0) or 0), shape(part)[dim]
            if base is None:
                base = node_arg(part, 0)
            if part.args[0] is not base or not same(start, at):
                return None
            at = at + size
        return base if same(at, shape(base)[dim]) else None

    # Sizes

    def dims(self, sizes: Sequence[Size]) -> list[Dim]:
        """Sizes as node arguments."""
        return [self.dim(s) for s in sizes]

    def dim(self, size: Size | fx.Node) -> Dim:
        """A size as a node argument: a number, or the node that computes the symbolic expression."""
        if isinstance(size, (int, fx.Node)):
            return size
        expr = size.node.expr
        if expr.is_Integer:
            return int(expr)
        return self._expression(expr)

    @staticmethod
    def size_of(dim: Dim | Size) -> Size:
        """The size that a node argument stands for."""
        return value(dim) if isinstance(dim, fx.Node) else dim

    def _expression(self, expr: sympy.Expr) -> fx.Node:
        if expr not in self._symbols:
            missing = expr.free_symbols - self._symbols.keys()
            if missing:
                raise LookupError(f"no node gives the size {', '.join(map(str, missing))}")
            before = self.output.prev
            self._symbols[expr] = fxgraph.build_size(self.graph, expr, self._symbols, self.output)
            node = before.next
            while node is not self.output:
                values = [value(a) if isinstance(a, fx.Node) else a for a in node.args]
                node.meta["val"] = node.target(*values)
                node = node.next
        return self._symbols[expr]

    def _collect_symbols(self, late: set[fx.Node]) -> None:
        """Which node gives which symbolic size.  Inputs first, and the backward last: a size that the forward reads
        must not come from a tangent, nor from a tensor that the rewrite is about to remove."""

        def source(node: fx.Node) -> tuple[bool, bool]:
            return node in late, node.op != "placeholder" and any(is_tensor(a) for a in node.all_input_nodes)

        for node in self.graph.nodes:
            val = value(node)
            if isinstance(val, torch.SymInt) and (node.op == "placeholder" or _is_unbacked(node)):
                self._symbols.setdefault(val.node.expr, node)
        for node in sorted(self.graph.nodes, key=source):
            if node.op not in ("placeholder", "call_function") or not is_tensor(node):
                continue
            for position, size in enumerate(value(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in self._symbols:
                    self._symbols[size.node.expr] = self.call(aten.sym_size.int, node, position)

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        """One result of a node with several."""
        return self.call(operator.getitem, node, index)


def _constant(node: Any) -> Any:
    """The number that every element of a node is, where its calls alone tell it; None elsewhere."""
    target = target_of(node)
    if target is aten.full.default:
        return node.args[1] if isinstance(node.args[1], (int, float)) else None
    if target not in (aten.neg.default, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return None
    known: list[Any] = [a if isinstance(a, (int, float)) else _constant(a) for a in node.args]
    if any(a is None for a in known) or not value(node).dtype.is_floating_point or known[1:] == [0]:
        return None
    function = {aten.neg: operator.neg, aten.mul: operator.mul, aten.div: operator.truediv}[target.overloadpacket]
    return function(*known)  # type: ignore[operator]


def _is_unbacked(node: fx.Node) -> bool:
    """A number that only the data decides, where it first appears (an item, the length of a nonzero)."""
    expr = value(node).node.expr
    return expr.is_Symbol and not value(node).node.has_hint()


def _freeze(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return tuple(_freeze(x) for x in item)
    if isinstance(item, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in item.items()))
    if isinstance(item, (int, float)):
        return (type(item).__name__, repr(item))  # 1, 1.0 and True are different arguments
    return item
