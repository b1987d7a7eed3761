"""Slices, selects, splits, concatenations and their scatters, along the vocabulary or along rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.fx as fx

from ..graph import Dim, GraphBuilder, Size, arg, aten, node_arg, same, same_sizes, shape
from ..layout import Layout, Layouts
from ..rowmap import RowMap, Span, Step
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter


def row_dim(dim: int, vocab: int | None) -> int:
    """Place of a dimension among the row dimensions."""
    return dim - (1 if vocab is not None and vocab < dim else 0)


def _text(dim: Any) -> str:
    return str(GraphBuilder.size_of(dim))


def slice_step(
    parent: tuple[Size, ...], dim: int, start: Dim | None, end: Dim | None, stride: int, length: Size
) -> Step:
    """Rows ``start:end:stride`` of a row dimension (Python's rules for negative and missing bounds)."""
    size = parent[dim]
    first = _bound(start, size, 0)
    key = (
        *map(str, parent),
        "slice",
        dim,
        _text(first) if first is not None else ("raw", _text(start)),
        str(length),
        stride,
    )

    def select(b: GraphBuilder, positions: fx.Node) -> fx.Node:
        return b.call(aten.slice.Tensor, positions, dim, start, end, stride)

    span = Span(dim, first, length) if stride == 1 and first is not None else None
    return Step(key, parent, select, span)


def _bound(bound: Any, size: Size, missing: Size) -> Size | None:
    """A slice's start as a size from the front; None when its sign or order is not known."""
    bound = GraphBuilder.size_of(bound)
    if bound is None:
        return missing
    if isinstance(bound, int):
        if bound >= 0:
            return min(bound, size) if isinstance(size, int) else bound
        return max(0, bound + size) if isinstance(size, int) else size + bound
    return bound


def select_step(parent: tuple[Size, ...], dim: int, index: Dim) -> Step:
    """One position of a row dimension, which disappears."""
    at = _bound(index, parent[dim], 0)
    key = (*map(str, parent), "select", dim, _text(at))

    def select(b: GraphBuilder, positions: fx.Node) -> fx.Node:
        return b.call(aten.select.int, positions, dim, index)

    return Step(key, parent, select, Span(dim, at, 1) if at is not None else None)


def _row_step(node: fx.Node, parent: fx.Node, vocab: int | None, part: fx.Node) -> Step:
    """The rows that a slice or select (or the source of a slice_scatter or select_scatter) takes from ``parent``."""
    scatters = node.target in (aten.slice_scatter.default, aten.select_scatter.default)
    at = 2 if scatters else 1
    dim = arg(node, at, "dim", 0) % len(shape(parent))
    rows = tuple(s for i, s in enumerate(shape(parent)) if i != vocab)
    if node.target in (aten.select.int, aten.select_scatter.default):
        return select_step(rows, row_dim(dim, vocab), arg(node, at + 1, "index"))
    start, end, stride = arg(node, at + 1, "start"), arg(node, at + 2, "end"), arg(node, at + 3, "step", 1)
    return slice_step(rows, row_dim(dim, vocab), start, end, stride, shape(part)[dim])


@rule(aten.slice.Tensor, aten.select.int)
class Selection(Rule):
    """Along the vocabulary a narrower region (or a row value), along rows another row space."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x = node_arg(node, 0)
        source = layouts.get(x)
        if source is None or source.vocab is None:
            return
        dim, drops = arg(node, 1, "dim", 0) % len(shape(x)), node.target is aten.select.int
        if dim == source.vocab:
            layouts.set(node, source.space, None if drops else dim)
        elif same_sizes(shape(node), shape(x)):
            layouts.set(node, *source)
        elif node not in layouts:
            layouts.set(node, layouts.new_space(), source.vocab - (drops and dim < source.vocab))

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x = node_arg(node, 0)
        if x not in e.layouts:
            return e.outer(node, shape(node), e.layouts[node].vocab, rowmap)
        vocab, dim = e.layouts[x].vocab, arg(node, 1, "dim", 0) % len(shape(x))
        if dim == vocab:
            dense = e.dense(x, rowmap)
            if node.target is aten.select.int:
                index = arg(node, 2, "index")
                return e.call(aten.slice.Tensor, dense, 1, *one_column(e, index))
            bounds = [e.operand(a, [], None, rowmap) for a in node.args[2:]]
            return e.call(aten.slice.Tensor, dense, 1, *bounds)
        if node.target is aten.slice.Tensor and same_sizes(shape(node), shape(x)):
            return e.value(x, rowmap)
        return e.from_parent(x, _row_step(node, x, vocab, node), rowmap)


def one_column(e: Emitter, index: Any) -> tuple[Any, Any]:
    """Slice bounds of one column."""
    if not isinstance(index, int):
        raise e.region.refuse(
            index, "NO_ROW_RULE", "one column of the logits is selected by a number that varies; use gather"
        )
    return index, index + 1 if index != -1 else None


class SplitPart(Rule):
    """One part of a split or unbind."""

    @staticmethod
    def _bounds(node: fx.Node) -> tuple[fx.Node, int, Any, Any]:
        parent = node_arg(node, 0)
        x, index = node_arg(parent, 0), cast(int, node.args[1])
        if parent.target is aten.unbind.int:
            return x, arg(parent, 1, "dim", 0) % len(shape(x)), index, index + 1
        sizes: Any = parent.args[1]
        dim = arg(parent, 2, "dim", 0) % len(shape(x))
        if isinstance(sizes, (list, tuple)):
            known = [GraphBuilder.size_of(s) for s in sizes]
            return x, dim, sum(known[:index]), sum(known[: index + 1])
        size = GraphBuilder.size_of(sizes)
        return x, dim, index * size, index * size + shape(node)[dim]

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x, dim, _, _ = self._bounds(node)
        source = layouts.get(x)
        if source is None or source.vocab is None or node in layouts:
            return
        drops = node_arg(node, 0).target is aten.unbind.int
        if dim == source.vocab:
            layouts.set(node, source.space, None if drops else dim)
        else:
            layouts.set(node, layouts.new_space(), source.vocab - (drops and dim < source.vocab))

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x, dim, start, end = self._bounds(node)
        vocab = e.layouts[x].vocab
        lo, hi = e.builder.dim(start), e.builder.dim(end)
        if dim == vocab:
            return e.call(aten.slice.Tensor, e.dense(x, rowmap), 1, e.draft.size(lo), e.draft.size(hi))
        rows = tuple(e.layouts.rows(x))
        if node_arg(node, 0).target is aten.unbind.int:
            return e.from_parent(x, select_step(rows, row_dim(dim, vocab), lo), rowmap)
        return e.from_parent(x, slice_step(rows, row_dim(dim, vocab), lo, hi, 1, shape(node)[dim]), rowmap)


split_part = SplitPart()


@rule(aten.slice_scatter.default, aten.select_scatter.default)
class SelectionScatter(Rule):
    """An in-place edit of a part, or the gradient of a slice: ``src`` where it was selected, ``base`` elsewhere."""

    @staticmethod
    def source_vocab(node: fx.Node, vocab: int) -> int:
        """The vocabulary dimension of the source of a scatter along rows."""
        dim = arg(node, 2, "dim", 0) % len(shape(node))
        return vocab - (node.target is aten.select_scatter.default and dim < vocab)

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        base, src = node.args[:2]
        layout = layouts.get(node) or layouts.get(base) or self._from_source(layouts, node, src)
        if layout is None or layout.vocab is None:
            return
        layouts.set(node, *layout)
        layouts.set(base, *layout)
        if arg(node, 2, "dim", 0) % len(shape(node)) == layout.vocab:
            if node.target is aten.slice_scatter.default:
                layouts.set(src, *layout)
        elif src not in layouts:
            layouts.set(src, layouts.new_space(), self.source_vocab(node, layout.vocab))

    @staticmethod
    def _from_source(layouts: Layouts, node: fx.Node, src: Any) -> Layout | None:
        source, dim = layouts.get(src), arg(node, 2, "dim", 0) % len(shape(node))
        if source is None:
            return None
        if source.vocab is None:  # a row value written into one column
            if node.target is aten.select_scatter.default and same_sizes(
                [s for i, s in enumerate(shape(node)) if i != dim], shape(src)
            ):
                return Layout(source.space, dim)
            return None
        vocab = source.vocab + (node.target is aten.select_scatter.default and dim <= source.vocab)
        along = dim == vocab and node.target is aten.slice_scatter.default
        return Layout(source.space if along else layouts.new_space(), vocab)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        base, src = node.args[:2]
        sizes, vocab = shape(node), e.layouts[node].vocab
        assert vocab is not None and isinstance(src, fx.Node)
        if arg(node, 2, "dim", 0) % len(sizes) == vocab:
            whole = e.draft.dense(e.operand(base, sizes, vocab, rowmap), e.builder.dim(sizes[vocab]))
            if node.target is aten.select_scatter.default:
                part = e.draft.dense(e.operand(src, shape(src), None, rowmap), 1)
                return e.call(aten.slice_scatter.default, whole, part, 1, *one_column(e, arg(node, 3, "index")))
            part = e.dense_operand(src, vocab, rowmap)
            return e.call(
                aten.slice_scatter.default, whole, part, 1, *[e.operand(a, [], None, rowmap) for a in node.args[3:]]
            )
        inverse = row_step_of_scatter(e, node).inverse(
            tuple(s for i, s in enumerate(shape(src)) if i != self.source_vocab(node, vocab))
        )
        chosen = e.operand(src, shape(src), self.source_vocab(node, vocab), rowmap.then(inverse))
        return e.where_present(inverse, rowmap, chosen, e.operand(base, sizes, vocab, rowmap))


def row_step_of_scatter(e: Emitter, node: fx.Node) -> Step:
    """The selection that a slice_scatter or select_scatter along rows undoes."""
    return _row_step(node, node, e.layouts[node].vocab, node_arg(node, 1))


def cat_dim(node: fx.Node) -> int:
    """The dimension of a cat."""
    return arg(node, 1, "dim", 0) % len(shape(node))


def cat_parts(node: fx.Node) -> list[fx.Node]:
    """What a cat joins."""
    return cast("list[fx.Node]", node.args[0])


def cat_steps(e: Emitter, node: fx.Node) -> list[Step]:
    """For each part of a cat along rows: its rows in the result."""
    vocab, dim = e.layouts[node].vocab, cat_dim(node)
    rows, steps = tuple(e.layouts.rows(node)), []
    at: Size = 0
    for part in cat_parts(node):
        length = shape(part)[dim]
        lo, hi = e.builder.dim(at), e.builder.dim(at + length)
        steps.append(slice_step(rows, row_dim(dim, vocab), lo, hi, 1, length))
        at = at + length
    return steps


@rule(aten.cat.default)
class Cat(Rule):
    """Along the vocabulary a wider region, along rows a choice between row spaces."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        parts = cat_parts(node)
        dim, layout = cat_dim(node), layouts.get(node)
        wide = [layouts[p] for p in parts if p in layouts and layouts[p].vocab is not None]
        along = [known for known in wide if known.vocab == dim]
        if layout is None and along:
            layout = along[0]
            layouts.set(node, *layout)
        elif layout is None and wide:
            layout = Layout(layouts.new_space(), wide[0].vocab)
            layouts.set(node, *layout)
        if layout is None or layout.vocab is None:
            return
        for part in parts:
            if layout.vocab == dim:
                layouts.set(part, *layout)
            elif part not in layouts:
                layouts.set(part, layouts.new_space(), layout.vocab)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        parts = cat_parts(node)
        vocab = e.layouts[node].vocab
        assert vocab is not None
        if cat_dim(node) == vocab:
            columns = [
                e.draft.dense(e.operand(p, shape(p), vocab, rowmap), e.builder.dim(shape(p)[vocab])) for p in parts
            ]
            return e.call(aten.cat.default, columns, 1)
        result: fx.Node | None = None
        for part, step in reversed(list(zip(parts, cat_steps(e, node)))):
            inverse = step.inverse(tuple(s for i, s in enumerate(shape(part)) if i != vocab))
            chosen = e.operand(part, shape(part), vocab, rowmap.then(inverse))
            result = chosen if result is None else e.where_present(inverse, rowmap, chosen, result)
        assert result is not None
        return result


@rule(aten.constant_pad_nd.default)
class Pad(Rule):
    """Padding along the vocabulary (the gradient of a narrowed vocabulary)."""

    @staticmethod
    def _amounts(node: fx.Node) -> list[Any]:
        return list(cast("list[Any]", node.args[1]))

    def _padded(self, node: fx.Node) -> list[int]:
        pad = self._amounts(node)
        rank = len(shape(node))
        return [rank - 1 - i for i in range(len(pad) // 2) if not (same_zero(pad[2 * i]) and same_zero(pad[2 * i + 1]))]

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x = node.args[0]
        layout = layouts.get(x) or layouts.get(node)
        if layout is not None and layout.vocab is not None and self._padded(node) == [layout.vocab]:
            layouts.set(node, *layout)
            layouts.set(x, *layout)

    def is_local(self, layouts: Layouts, node: fx.Node) -> bool:
        return self._padded(node) == [layouts[node].vocab]

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x = node_arg(node, 0)
        vocab = e.layouts[node].vocab
        assert vocab is not None
        at = 2 * (len(shape(node)) - 1 - vocab)
        pad = [e.operand(p, [], None, rowmap) for p in self._amounts(node)[at : at + 2]]
        dense = e.draft.dense(e.operand(x, shape(x), vocab, rowmap), e.builder.dim(shape(x)[vocab]))
        return e.call(aten.constant_pad_nd.default, dense, pad, arg(node, 2, "value", 0))


def same_zero(pad: Any) -> bool:
    """Statically no padding."""
    return same(GraphBuilder.size_of(pad), 0)
