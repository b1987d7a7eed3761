"""Taking a joint graph to the form that the engine reads."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

import torch.fx as fx

from ._compat import fxgraph
from .depth import after_tangent
from .graph import GraphBuilder, Size, arg, aten, hint, is_one, node_arg, same, same_sizes, shape, target_of, value

WRITES = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
"""What writes a part of a tensor, and what reads it."""


def normalise(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` without no-ops, with equal calls made once, and reads of a part that was just written
    resolved."""
    copy = copied(graph)
    fxgraph.remove_noops(copy)
    copy = fxgraph.common_subexpressions(copy)
    _undo_copies(copy)
    undo_views(copy, {aten.view.default})  # never a copy, so the strides are the same as well
    _resolve_reads_of_writes(copy)
    _drop_overwritten(copy)
    _flatten_batched_matmuls(copy)
    copy.eliminate_dead_code()
    return copy


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph with nodes of its own."""
    copy = fx.Graph(graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    output = copy.graph_copy(graph, env)
    copy.output(output)
    for old, new in env.items():
        new.meta = dict(old.meta)
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    next(n for n in reversed(copy.nodes) if n.op == "output").meta = dict(last.meta)
    return copy


def _flatten_batched_matmuls(graph: fx.Graph) -> None:
    """Matmuls of a batch with one weight become matmuls of all its rows, and sums over the batch matmuls over all
    rows."""
    batched = [n for n in graph.nodes if target_of(n) is aten.bmm.default]
    if not batched:
        return
    builder = GraphBuilder(graph, after_tangent(graph))
    for node in batched:
        result, flat = node, _as_one_matmul(builder, node)
        if flat is None and len(node.users) == 1:
            result = next(iter(node.users))
            flat = _as_sum_over_batch(builder, result)
        if flat is not None:
            flat.meta.update({k: v for k, v in node.meta.items() if k != "val"})
            result.replace_all_uses_with(builder.view(flat, shape(result)))
    fxgraph.sort_topologically(graph)


def _as_one_matmul(b: GraphBuilder, node: fx.Node) -> fx.Node | None:
    left, right = node_arg(node, 0), node_arg(node, 1)
    (batch, rows, inner), columns = shape(left), shape(right)[-1]
    if is_one(batch):
        return b.call(aten.mm.default, b.view(left, [rows, inner]), b.view(right, [inner, columns]))
    weight = _repeated(b, right)
    if weight is None:
        return None
    return b.call(aten.mm.default, b.view(left, [batch * rows, inner]), weight)


def pad_short_indices(graph: fx.Graph) -> None:
    """Gives the index of a gather or scatter_add as many rows as the tensor that it indexes.

    Torch lets it have fewer.  Two inputs whose sizes became symbolic one by one (hidden and labels) have unrelated
    symbols, so this is how most recompiled graphs look.  The added rows pick, or add zero to, element 0 and are cut off
    again.
    """
    builder: GraphBuilder | None = None
    for node in list(graph.nodes):
        target = target_of(node)
        if target not in (aten.gather.default, aten.scatter_add.default):
            continue
        x, index = node.args[0], arg(node, 2, "index")
        dim, sizes, short = arg(node, 1, "dim") % max(1, len(shape(x))), shape(x), shape(index)
        missing = [d for d in range(len(sizes)) if d != dim and not same(sizes[d], short[d])]
        if not missing or hint(sizes[dim]) < 4 * hint(short[dim]):
            continue
        builder = builder or GraphBuilder(graph, after_tangent(graph))
        longer = _padded(builder, index, sizes, missing)
        if target is aten.gather.default:
            result = builder.call(target, x, dim, longer)
            for d in missing:
                result = builder.slice(result, d, 0, short[d])
        else:
            src = arg(node, 3, "src")
            if not same_sizes(shape(src), short):
                continue
            result = builder.call(target, x, dim, longer, _padded(builder, src, sizes, missing))
        for key in ("stack_trace", "fwd_stack_trace"):
            result.meta.setdefault(key, node.meta.get(key))
        node.replace_all_uses_with(result)
    if builder is not None:
        fxgraph.sort_topologically(graph)


def _padded(b: GraphBuilder, x: fx.Node, sizes: list[Size], dims: list[int]) -> fx.Node:
    pads: list[Any] = []
    for d in reversed(range(len(sizes))):
        pads += [0, b.dim(sizes[d] - shape(x)[d]) if d in dims else 0]
    return b.call(aten.constant_pad_nd.default, x, pads, 0)


def _repeated(b: GraphBuilder, x: Any) -> fx.Node | None:
    """The matrix that a batch repeats, or None."""
    if target_of(x) is aten.permute.default and x.args[1] == [0, 2, 1]:
        inner = _repeated(b, x.args[0])
        return None if inner is None else b.permute(inner, [1, 0])
    if target_of(x) is not aten.expand.default:
        return None
    source = shape(x.args[0])
    one_matrix = len(source) == 2 or (len(source) == 3 and is_one(source[0]))
    return b.view(x.args[0], source[-2:]) if one_matrix and same_sizes(source[-2:], shape(x)[-2:]) else None


def _as_sum_over_batch(b: GraphBuilder, node: fx.Node) -> fx.Node | None:
    if target_of(node) is not aten.sum.dim_IntList:
        return None
    if list(cast("list[int]", node.args[1])) != [0] or node.kwargs.get("dtype"):
        return None
    product = node_arg(node, 0)
    left, right = node_arg(product, 0), node_arg(product, 1)
    (batch, rows, inner), columns = shape(left), shape(right)[-1]
    joined = b.view(b.permute(left, [1, 0, 2]), [rows, batch * inner])
    return b.call(aten.mm.default, joined, b.view(right, [batch * inner, columns]))


def _undo_copies(graph: fx.Graph) -> None:
    """A copy into a tensor of the same kind is what was copied."""
    for node in list(graph.nodes):
        if target_of(node) is not aten.copy.default:
            continue
        old, new = node_arg(node, 0), node_arg(node, 1)
        alike = value(old).dtype == value(new).dtype and value(old).device == value(new).device
        if alike and same_sizes(shape(old), shape(new)):
            node.replace_all_uses_with(new)


def undo_views(graph: fx.Graph, views: Container[Any]) -> None:
    """A view of a view that has the shape of what the first one shows is that: in-place edits of a matmul's view come
    back through the matmul's own shape, and a stack that was flattened on its way is given its shape again.

    ``views`` are the operations that count."""
    for node in list(graph.nodes):
        source: Any = node
        while target_of(source) in views:
            source = source.args[0]
            if source is not node.args[0] and same_sizes(shape(source), shape(node)):
                node.replace_all_uses_with(source)
                break


def _drop_overwritten(graph: fx.Graph) -> None:
    """A part that is written twice is written once: the gradient of an in-place edit goes where the gradient of its
    result went before."""
    for node in list(graph.nodes):
        target = target_of(node)
        if target not in WRITES:
            continue
        while target_of(write := node_arg(node, 0)) is target:
            if not same_sizes(shape(node_arg(write, 1)), shape(node_arg(node, 1))) or _place(node, 2) != _place(
                write, 2
            ):
                break
            node.update_arg(0, write.args[0])


def _resolve_reads_of_writes(graph: fx.Graph) -> None:
    """``slice(slice_scatter(base, src, where), where)`` is ``src``, and elsewhere it is the slice of ``base``: what
    functionalisation leaves of in-place edits of views."""
    for node in list(graph.nodes):
        target = target_of(node)
        if target not in WRITES.values():
            continue
        while WRITES.get(target_of(write := node_arg(node, 0))) is target:
            src = node_arg(write, 1)
            if same_sizes(shape(src), shape(node)) and _place(node, 1) == _place(write, 2):
                node.replace_all_uses_with(src)
                break
            if not _apart(_span(node, 1, shape(node)), _span(write, 2, shape(src))):
                break
            node.update_arg(0, write.args[0])


def _span(node: fx.Node, first: int, sizes: list[Size]) -> tuple[int, int, int] | None:
    """Dimension, start and end of what a slice or select reads or writes, ``sizes``; None where they are no
    numbers."""
    own = shape(node.args[0])
    dim, start = arg(node, first, "dim", 0) % len(own), arg(node, first + 1, "start") or 0
    single = node.target in (aten.select.int, aten.select_scatter.default)
    if single:
        start = arg(node, first + 1, "index")
    length = 1 if single else sizes[dim]
    if not isinstance(start, int) or start < 0 or not isinstance(length, int):
        return None
    return (dim, start, start + length) if single or arg(node, first + 3, "step", 1) == 1 else None


def _apart(read: tuple[int, int, int] | None, written: tuple[int, int, int] | None) -> bool:
    """Whether what is read lies beside what was written."""
    if read is None or written is None or read[0] != written[0]:
        return False
    return read[2] <= written[1] or written[2] <= read[1]


def _place(node: fx.Node, first: int) -> tuple[Any, ...]:
    rank = len(shape(node.args[0]))
    dim = arg(node, first, "dim", 0) % rank
    if node.target in (aten.select.int, aten.select_scatter.default):
        return dim, str(arg(node, first + 1, "index"))
    size = shape(node.args[0])[dim]
    start = GraphBuilder.size_of(arg(node, first + 1, "start") or 0)
    if isinstance(start, int) and start < 0:
        start = start + size
    return dim, "0" if same(start, 0) else str(start), str(arg(node, first + 3, "step", 1))
