"""Views: the same elements under other dimensions; nothing is left of them in a chunk program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.fx as fx

from ..graph import Size, aten, is_one, node_arg, numel, right_aligned, same, shape
from ..layout import Layouts
from ..rowmap import RowMap, Step
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter


@rule(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default
)
class Identity(Rule):
    """The same tensor."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        source, own = layouts.get(node.args[0]), layouts.get(node)
        if source is not None:
            layouts.set(node, *source)
        elif own is not None and own.vocab is not None:
            layouts.set(node.args[0], *own)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        return e.operand(node.args[0], shape(node), e.layouts[node].vocab, rowmap)


def vocab_through_view(source: list[Size], result: list[Size], vocab: int) -> int | None:
    """Where dimension ``vocab`` of ``source`` stands after a view, or None when the view merges or splits it."""
    before, after = numel(source[:vocab]), numel(source[vocab + 1 :])
    for position, size in enumerate(result):
        if (
            same(size, source[vocab])
            and same(numel(result[:position]), before)
            and same(numel(result[position + 1 :]), after)
        ):
            return position
    return None


@rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
class View(Rule):
    """Row-major order of the rows is kept, so the row space is, as long as the vocabulary dimension survives whole."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x = node_arg(node, 0)
        source, own = layouts.get(x), layouts.get(node)
        if source is not None:
            if source.vocab is None:
                layouts.set(node, source.space, None)
                return
            vocab = vocab_through_view(shape(x), shape(node), source.vocab)
            if vocab is None:
                layouts.conflict(
                    node,
                    "LAYOUT",
                    "this view merges the vocabulary with another dimension; keep it as a dimension of its own",
                )
            else:
                layouts.set(node, source.space, vocab)
        elif own is not None and own.vocab is not None:
            vocab = vocab_through_view(shape(node), shape(x), own.vocab)
            if vocab is not None:
                layouts.set(x, own.space, vocab)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        if node.args[0] not in e.layouts:
            return e.outer(node, shape(node), e.layouts[node].vocab, rowmap)
        return e.value(node_arg(node, 0), rowmap)


@rule(aten.permute.default, aten.t.default, aten.transpose.int)
class Permute(Rule):
    """Moving the vocabulary dimension keeps the rows; reordering row dimensions is a selection of rows."""

    @staticmethod
    def order(node: fx.Node) -> list[int]:
        """The permutation."""
        rank = len(shape(node))
        given: Any = node.args[1:]
        if node.target is aten.permute.default:
            return [d % rank for d in given[0]]
        order = list(range(rank))
        i, j = (0, rank - 1) if node.target is aten.t.default else (given[0] % rank, given[1] % rank)
        order[i], order[j] = order[j], order[i]
        return order

    @staticmethod
    def _keeps_rows(order: list[int], sizes: list[Size], vocab: int | None) -> bool:
        rows = [d for d in order if d != vocab and not is_one(sizes[d])]
        return rows == sorted(rows)

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x = node_arg(node, 0)
        order, source, own = self.order(node), layouts.get(x), layouts.get(node)
        if source is not None:
            vocab = None if source.vocab is None else order.index(source.vocab)
            if self._keeps_rows(order, shape(x), source.vocab):
                layouts.set(node, source.space, vocab)
            elif source.vocab is not None and own is None:
                layouts.set(node, layouts.new_space(), vocab)
        elif own is not None and own.vocab is not None and self._keeps_rows(order, shape(x), order[own.vocab]):
            layouts.set(x, own.space, order[own.vocab])

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x = node_arg(node, 0)
        source = e.layouts.get(x)
        if source is None:
            return e.outer(node, shape(node), e.layouts[node].vocab, rowmap)
        order = self.order(node)
        if self._keeps_rows(order, shape(x), source.vocab):
            return e.value(x, rowmap)
        rows = [d for d in range(len(order)) if d != source.vocab]
        inner = [rows.index(d) for d in order if d != source.vocab]
        parent = tuple(e.layouts.rows(x))
        step = Step((*map(str, parent), "permute", *inner), parent, lambda b, positions: b.permute(positions, inner))
        return e.from_parent(x, step, rowmap)


@rule(aten.expand.default)
class Expand(Rule):
    """Broadcasting: of a row value along the vocabulary it is nothing; of the logits along rows it is a selection."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        x = node_arg(node, 0)
        source = layouts.get(x)
        if source is None:
            return
        shift = len(shape(node)) - len(shape(x))
        padded = right_aligned(shape(x), len(shape(node)))
        stretched = [d for d, size in enumerate(shape(node)) if not same(padded[d], size)]
        if not stretched:
            layouts.set(node, source.space, None if source.vocab is None else source.vocab + shift)
        elif source.vocab is not None and node not in layouts:
            layouts.set(node, layouts.new_space(), source.vocab + shift)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x = node_arg(node, 0)
        sizes, source, vocab = shape(node), e.layouts.get(x), e.layouts[node].vocab
        if source is None or source.vocab is None or source.space == e.layouts[node].space:
            return e.spread(x, sizes, vocab, rowmap)
        parent = tuple(e.layouts.rows(x))
        rows = e.layouts.rows(node)
        step = Step(
            (*map(str, parent), "expand", *map(str, rows)),
            parent,
            lambda b, p: b.call(aten.expand.default, p, b.dims(rows)),
        )
        return e.from_parent(x, step, rowmap)
