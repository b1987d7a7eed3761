"""Picking and setting single elements: gather, scatter, advanced indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.fx as fx

from ..graph import (
    Size,
    arg,
    aten,
    is_one,
    is_tensor,
    node_arg,
    numel,
    prims,
    right_aligned,
    same,
    same_sizes,
    shape,
    target_of,
    value,
)
from ..layout import Layout, Layouts
from ..rowmap import RowMap, Step
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter


@rule(aten.gather.default)
class Gather(Rule):
    """K elements of each row."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        source = layouts.get(node.args[0])
        if source is None or source.vocab is None:
            return
        dim = arg(node, 1, "dim") % len(shape(node))
        if dim != source.vocab:
            layouts.conflict(node, "MIXES_ROWS", "{op} runs over the rows of the logits, not over the vocabulary")
        elif not same_sizes(layouts.rows(node, dim), layouts.rows(node_arg(node, 0))):
            layouts.conflict(
                node, "LAYOUT", "gather has fewer rows than the logits; slice the logits to the same rows first"
            )
        else:
            layouts.set(node, source.space, dim)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x, index = node_arg(node, 0), arg(node, 2, "index")
        vocab = e.layouts[x].vocab
        assert vocab is not None
        return e.call(aten.gather.default, e.dense(x, rowmap), 1, e.dense_operand(index, vocab, rowmap))


@rule(aten.scatter_add.default, aten.scatter.value, aten.scatter.src, aten.scatter_reduce.two)
class Scatter(Rule):
    """K elements of each row set or added to; with one index a row, a comparison instead of a scatter."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        base, index = node.args[0], arg(node, 2, "index")
        layout = layouts.get(base) or layouts.get(node) or self._from_parts(layouts, node)
        if layout is None or layout.vocab is None:
            return
        if arg(node, 1, "dim") % len(shape(node)) != layout.vocab:
            layouts.conflict(node, "MIXES_ROWS", "{op} runs over the rows of the logits, not over the vocabulary")
        elif not same_sizes(layouts.rows(node, layout.vocab), layouts.rows(index, layout.vocab)):
            layouts.conflict(
                node, "LAYOUT", "scatter has fewer rows than the logits; slice the logits to the same rows first"
            )
        else:
            layouts.set(node, *layout)
            layouts.set(base, *layout)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        base, index, src = node.args[0], arg(node, 2, "index"), node.args[3] if len(node.args) > 3 else None
        sizes, vocab = shape(node), e.layouts[node].vocab
        assert vocab is not None
        target = e.operand(base, sizes, vocab, rowmap)
        if isinstance(src, fx.Node) and is_tensor(src) and not same_sizes(shape(src), shape(index)):
            raise e.region.refuse(node, "LAYOUT", "the source of scatter is larger than its index")
        if self._is_one_hot(node, index, vocab):
            return self._one_hot(e, node, target, index, src, rowmap)
        if isinstance(src, fx.Node) and is_tensor(src):
            src = e.dense_operand(src, vocab, rowmap)
        else:
            src = e.operand(src, [], None, rowmap)
        dense = e.draft.dense(target, e.builder.dim(sizes[vocab]))
        return e.call(node.target, dense, 1, e.dense_operand(index, vocab, rowmap), src, *node.args[4:], **node.kwargs)

    @staticmethod
    def _from_parts(layouts: Layouts, node: fx.Node) -> Layout | None:
        """Of elements that came from the logits (their top k) and go into a tensor as wide as the logits."""
        dim = arg(node, 1, "dim") % len(shape(node))
        parts = [layouts.get(a) for a in node.all_input_nodes[1:]]
        space = next((p.space for p in parts if p is not None and p.vocab == dim), None)
        return None if space is None else Layout(space, dim)

    @staticmethod
    def _is_one_hot(node: fx.Node, index: fx.Node, vocab: int) -> bool:
        """One index a row, whose range something else checks: a gather by the same index, or (for the constant of
        nll_loss's backward) the loss itself.  A comparison reads nothing out of range, so it could not raise."""
        if not is_one(shape(index)[vocab]) or node.target is aten.scatter_reduce.two:
            return False
        if node.target is aten.scatter.value and target_of(node.args[0]) is aten.full.default:
            return True
        return is_gathered(index, shape(node)[vocab])

    @staticmethod
    def _one_hot(e: Emitter, node: fx.Node, base: fx.Node, index: fx.Node, src: Any, rowmap: RowMap) -> fx.Node:
        sizes, vocab = shape(node), e.layouts[node].vocab
        assert vocab is not None
        position = e.operand(index, shape(index), vocab, rowmap)
        hit = e.call(aten.eq.Tensor, e.column_numbers(sizes[vocab]), position)
        if node.target is aten.scatter.value:
            dtype, device = value(node).dtype, value(node).device
            number = e.operand(src, [], None, rowmap)
            src = e.call(aten.full.default, [1, 1], number, dtype=dtype, device=device)
        else:
            src = e.operand(src, shape(src), vocab, rowmap)
        if node.target is aten.scatter_add.default:
            src = e.call(aten.add.Tensor, base, src)
        return e.call(aten.where.self, hit, src, base)


def is_gathered(index: fx.Node, columns: Size) -> bool:
    """Something gathers by this index from as many columns, which checks its range."""

    def columns_of(user: fx.Node) -> Size:
        return shape(user.args[0])[arg(user, 1, "dim") % len(shape(user.args[0]))]

    return any(u.target is aten.gather.default and same(columns_of(u), columns) for u in index.users)


def sum_of_one_hot(e: Emitter, x: fx.Node, rowmap: RowMap) -> fx.Node | None:
    """The sum over the vocabulary of one element a row among zeros: that element (log_softmax's backward asks for
    it)."""
    if (
        target_of(x) is not aten.scatter_add.default
        or target_of(x.args[0]) is not aten.full.default
        or node_arg(x, 0).args[1] != 0
    ):
        return None
    vocab, index, src = e.layouts[x].vocab, node_arg(x, 2), x.args[3]
    if vocab is None or not Scatter._is_one_hot(x, index, vocab) or not same_sizes(shape(src), shape(index)):
        return None
    return e.operand(src, shape(src), vocab, rowmap)


def index_list(node: fx.Node) -> list[fx.Node | None]:
    """The indices of an index or index_put, one for each dimension."""
    indices = list(cast("list[Any]", node.args[1]))
    return indices + [None] * (len(shape(node.args[0])) - len(indices))


def is_counter(index: fx.Node | None, size: Size) -> bool:
    """0, 1, 2, ... along one dimension, broadcast along the others."""
    if index is None:
        return False
    wide = [s for s in shape(index) if not is_one(s)]
    if len(wide) > 1 or (wide and not same(wide[0], size)) or (not wide and not is_one(size)):
        return False
    passes = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.clone.default, aten.alias.default}
    while target_of(index) in passes or target_of(index) is prims.convert_element_type.default:
        index = node_arg(index, 0)
    if target_of(index) is prims.iota.default:
        return arg(index, 1, "start", 0) == 0 and arg(index, 2, "step", 1) == 1
    return target_of(index) is aten.arange.default


def counts_rows(indices: list[fx.Node | None], sizes: list[Size], vocab: int) -> bool:
    """The row indices run over all rows in order, so that the column index picks one element of each row."""
    rank = len(sizes) - 1
    for place, (dim, size) in enumerate((d, s) for d, s in enumerate(sizes) if d != vocab):
        index = indices[dim]
        if not is_counter(index, size):
            return False
        own = shape(index)
        if not is_one(size) and len(own) - (rank - place) != next(i for i, s in enumerate(own) if not is_one(s)):
            return False
    return True


def wrapped(e: Emitter, index: fx.Node, columns: Size) -> fx.Node:
    """An index with Python's meaning of negative numbers, made non-negative."""
    negative = e.call(aten.lt.Scalar, index, 0)
    return e.call(
        aten.where.self, negative, e.call(aten.add.Tensor, index, e.draft.size(e.builder.dim(columns))), index
    )


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
class Index(Rule):
    """Advanced indexing: of rows (a selection), of one element in each row (a gather), or of both."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x = node_arg(node, 0)
        source = layouts.get(x)
        if source is None or source.vocab is None or node in layouts:
            return
        indices = index_list(node)
        used = [d for d, index in enumerate(indices) if index is not None]
        if used == [source.vocab] and len(shape(indices[source.vocab])) == 1:
            layouts.set(node, *source)
        elif source.vocab in used and len(used) == len(indices):
            every = counts_rows(indices, shape(x), source.vocab)
            rows_kept = every and same_sizes(shape(node), layouts.rows(x))
            layouts.set(node, source.space if rows_kept else layouts.new_space(), None)
        elif source.vocab not in used and used == list(range(used[0], used[-1] + 1)):
            behind = len(shape(x)) - source.vocab
            layouts.set(
                node, layouts.new_space(), source.vocab if source.vocab < used[0] else len(shape(node)) - behind
            )

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x = node_arg(node, 0)
        if x not in e.layouts:
            return e.outer(node, shape(node), e.layouts[node].vocab, rowmap)
        source, indices = e.layouts[x], index_list(node)
        vocab = source.vocab
        assert vocab is not None
        column = indices[vocab]
        if column is not None and e.layouts[node].vocab == vocab:
            return e.call(aten.index.Tensor, e.dense(x, rowmap), [None, e.draft.whole(column)])
        rows = [index for d, index in enumerate(indices) if d != vocab]
        if column is not None and e.layouts[node].space == source.space:
            picked = wrapped(e, e.operand(column, shape(node), None, rowmap), shape(x)[vocab])
            return e.call(aten.gather.default, e.dense(x, rowmap), 1, e.draft.dense(picked, 1))
        while rows and rows[-1] is None:
            rows.pop()
        parent = tuple(e.layouts.rows(x))
        key = (*map(str, parent), "index", *(i.name if i is not None else None for i in rows))
        step = Step(key, parent, lambda b, positions: b.call(aten.index.Tensor, positions, rows))
        if column is None:
            return e.from_parent(x, step, rowmap)
        step = Step(
            key,
            parent,
            lambda b, p: b.call(aten.expand.default, b.call(aten.index.Tensor, p, rows), b.dims(shape(node))),
        )
        picked = wrapped(e, e.operand(column, shape(node), None, rowmap), shape(x)[vocab])
        chosen = rowmap.then(step)
        return e.call(aten.gather.default, e.dense(x, chosen), 1, e.draft.dense(picked, 1))


def _fits(sizes: list[Size], rows: list[Size]) -> bool:
    """A shape that broadcasts to the rows without adding to them."""
    padded = right_aligned(sizes, len(rows))
    return len(sizes) <= len(rows) and all(is_one(a) or same(a, r) for a, r in zip(padded, rows))


def row_fill_vocab(node: fx.Node, vocab: int) -> int | None:
    """The vocabulary dimension of what an index_put writes into whole rows (the gradient of a selection of rows by
    index); None when it is no such write."""
    used = [d for d, index in enumerate(index_list(node)) if index is not None]
    fill = node.args[2]
    if not used or vocab in used or used != list(range(used[0], used[-1] + 1)) or not is_tensor(fill):
        return None
    place = vocab if vocab < used[0] else len(shape(fill)) - (len(shape(node)) - vocab)
    return place if 0 <= place < len(shape(fill)) and same(shape(fill)[place], shape(node)[vocab]) else None


@rule(aten.index_put.default, aten._unsafe_index_put.default)
class IndexPut(Rule):
    """The gradient of advanced indexing, or an edit by index: one element of each row, whole columns, or whole rows."""

    @staticmethod
    def kind(node: fx.Node, vocab: int) -> str | None:
        """ "element": one of each row; "columns": the same of all rows; "rows": whole rows set to one number."""
        indices = index_list(node)
        used = [d for d, index in enumerate(indices) if index is not None]
        rows = [s for d, s in enumerate(shape(node)) if d != vocab]
        if (
            len(used) == len(indices)
            and counts_rows(indices, shape(node), vocab)
            and _fits(shape(indices[vocab]), rows)
        ):
            return "element"
        if used == [vocab] and len(shape(indices[vocab])) == 1:
            return "columns"
        fill = node.args[2]
        if used and vocab not in used and is_tensor(fill) and all(is_one(s) for s in shape(fill)):
            return "rows"
        return None

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        layout = layouts.get(node.args[0]) or layouts.get(node)
        if layout is None or layout.vocab is None:
            return
        fill, place = node.args[2], row_fill_vocab(node, layout.vocab)
        if self.kind(node, layout.vocab) is None and place is not None:
            layouts.set(node, *layout)
            if fill not in layouts:
                layouts.set(fill, layouts.new_space(), place)
            return
        if self.kind(node, layout.vocab) is None:
            layouts.conflict(
                node, "LAYOUT", "elements of chosen rows are written; gather the log-probs of all rows and mask them"
            )
            return
        layouts.set(node, *layout)
        layouts.set(node.args[0], *layout)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        vocab = e.layouts[node].vocab
        assert vocab is not None
        sizes, indices, fill = shape(node), index_list(node), node.args[2]
        assert isinstance(fill, fx.Node)
        base = e.operand(node.args[0], sizes, vocab, rowmap)
        adds, kind = arg(node, 3, "accumulate", False), self.kind(node, vocab)
        if kind is None:
            raise e.region.refuse(
                node, "LAYOUT", "rows of the logits are written by index; compute all rows and mask them"
            )
        if kind == "rows":
            return self._rows(e, node, base, indices, fill, adds, vocab, rowmap)
        index = indices[vocab]
        assert index is not None
        if kind == "element":
            row_sizes = e.layouts.rows(node)
            position = wrapped(e, e.operand(index, row_sizes, None, rowmap), sizes[vocab])
            if not any(u.target in (aten.index.Tensor, aten.gather.default) for u in index.users):
                # A comparison reads nothing out of range, so it would not raise: look the number up, which does.
                numbers = e.draft.dense(e.column_numbers(sizes[vocab]), e.builder.dim(sizes[vocab]))
                position = e.call(aten.gather.default, numbers, 1, e.draft.dense(position, 1))
            hit = e.call(aten.eq.Tensor, e.column_numbers(sizes[vocab]), position)
            src = e.operand(fill, row_sizes, None, rowmap)
            return e.call(aten.where.self, hit, e.call(aten.add.Tensor, base, src) if adds else src, base)
        if not all(is_one(s) for s in shape(fill)):
            raise e.region.refuse(
                node, "NO_ROW_RULE", "different numbers are written into columns of the logits; use where"
            )
        dense = e.draft.dense(base, e.builder.dim(sizes[vocab]))
        number = e.draft.whole(e.builder.view(fill, []))
        return e.call(aten.index_put.default, dense, [None, e.draft.whole(index)], number, adds)

    @staticmethod
    def _rows(
        e: Emitter,
        node: fx.Node,
        base: fx.Node,
        indices: list[Any],
        fill: fx.Node,
        adds: bool,
        vocab: int,
        rowmap: RowMap,
    ) -> fx.Node:
        b, parent = e.builder, e.layouts.rows(node)
        if adds:
            raise e.region.refuse(node, "NO_ROW_RULE", "a number is added to chosen rows of the logits; use where")
        flags = b.full(parent, False, torch.bool, value(node).device)
        true = b.full([], True, torch.bool, value(node).device)
        rows = [index for d, index in enumerate(indices) if d != vocab]
        while rows and rows[-1] is None:
            rows.pop()
        flags = b.view(b.call(aten.index_put.default, flags, rows, true), [numel(parent), 1])
        return e.call(aten.where.self, e.draft.row(flags, rowmap), e.draft.whole(b.view(fill, [1, 1])), base)
