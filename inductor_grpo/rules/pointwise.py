"""Pointwise operations: every element by itself, operands broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from ..graph import aten, is_one, is_tensor, prims, same_sizes, shape, value
from ..layout import Layout, Layouts, aligned_rows
from ..rowmap import RowMap
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter

_ALSO_POINTWISE = {
    prims.convert_element_type.default, aten._to_copy.default, aten.where.self, aten.where.ScalarSelf,
    aten.where.ScalarOther, aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor,
}  # fmt: skip
if hasattr(prims, "fma"):
    _ALSO_POINTWISE.add(prims.fma.default)


_COMPARISONS = {
    overload for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge) for overload in (op.Tensor, op.Scalar)
}


def is_pointwise(target: Any) -> bool:
    """True for functional operations that torch tags as pointwise (and a few that it does not); never for random
    ones."""
    if target in _ALSO_POINTWISE:
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags and not target._schema.is_mutable


class Pointwise(Rule):
    """The result has the layout of its operands; full-sized operands of a vocabulary-sized result have it too."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        if not is_tensor(node):
            return
        layout = layouts.get(node) or self._from_operands(layouts, node)
        if layout is None or node in layouts.conflicts:
            return
        layouts.set(node, layout.space, layout.vocab)
        if layout.vocab is not None:
            self._to_operands(layouts, node, layout)

    @staticmethod
    def _from_operands(layouts: Layouts, node: fx.Node) -> Layout | None:
        sizes = shape(node)
        known = [(a, layouts[a]) for a in node.all_input_nodes if a in layouts]
        for a, layout in sorted(known, key=lambda item: item[1].vocab is None):
            shift = len(sizes) - len(shape(a))
            vocab = None if layout.vocab is None else layout.vocab + shift
            rows = aligned_rows(shape(a), len(sizes), vocab)
            if same_sizes(rows, aligned_rows(sizes, len(sizes), vocab)):
                return Layout(layout.space, vocab)
            if layout.vocab is not None:
                layouts.conflict(
                    node,
                    "MIXES_ROWS",
                    "the logits are broadcast over rows; expand the hidden states instead, before the head",
                )
                return None
        return None

    @staticmethod
    def _to_operands(layouts: Layouts, node: fx.Node, layout: Layout) -> None:
        sizes, own_vocab = shape(node), layout.vocab
        assert own_vocab is not None
        own_rows = aligned_rows(sizes, len(sizes), own_vocab)
        for a in node.all_input_nodes:
            if not is_tensor(a) or not shape(a):
                continue
            shift = len(sizes) - len(shape(a))
            rows = aligned_rows(shape(a), len(sizes), own_vocab)
            vocab = own_vocab - shift
            if shift and all(is_one(r) for r in rows):
                continue  # one row for all, also where there is only one
            if not same_sizes(rows, own_rows):
                if layouts.is_wide(a) and not all(is_one(r) for r in rows):
                    layouts.conflict(
                        node,
                        "MIXES_ROWS",
                        "the logits are broadcast over rows; expand the hidden states instead, before the head",
                    )
            elif vocab >= 0 and not is_one(shape(a)[vocab]):
                layouts.set(a, layout.space, vocab)
            elif a in layouts and layouts[a].vocab is None:
                layouts.unite(layouts[a].space, layout.space)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        layout = e.layouts.get(node)
        sizes, vocab = shape(node), None if layout is None else layout.vocab
        if node.target in _COMPARISONS and vocab is not None:
            with e.recomputing():
                return e.call(node.target, *[e.operand(a, sizes, vocab, rowmap) for a in node.args])
        target = _WITH_TENSOR_BOUNDS.get(node.target, node.target) if _has_varying_number(node) else node.target
        if target is node.target and _has_varying_number(node) and not _takes_tensors(node):
            message = (
                f"{node.target} takes a number that varies where only a constant can be streamed; make it a tensor"
            )
            raise e.region.refuse(node, "NO_ROW_RULE", message)
        args = [e.operand(a, sizes, vocab, rowmap) for a in node.args]
        kwargs = {k: e.operand(v, sizes, vocab, rowmap) for k, v in node.kwargs.items()}
        return e.call(target, *args, **kwargs)


_WITH_TENSOR_BOUNDS: dict[Any, Any] = {
    aten.clamp.default: aten.clamp.Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
}


def _varies(x: Any) -> bool:
    return isinstance(value(x), torch.SymFloat)


def _has_varying_number(node: fx.Node) -> bool:
    """A Python float that became a symbol; it reaches a chunk program as a 0-dim tensor."""
    return any(_varies(a) for a in node.all_input_nodes)


def _takes_tensors(node: fx.Node) -> bool:
    """Each such number stands where the operation takes a tensor too."""
    if any(_varies(v) for v in node.kwargs.values()) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    kinds = [str(a.type) for a in node.target._schema.arguments]
    return all(kind == "Tensor" for a, kind in zip(node.args, kinds) if _varies(a))


POINTWISE = Pointwise()


@rule(
    aten.full.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default
)
class Constant(Rule):
    """One value everywhere; its layout comes from its uses, or from the tensor that it is like."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        source = layouts.get(node.args[0])
        if source is not None:
            layouts.set(node, *source)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        fill: Any = 1 if node.target is aten.ones_like.default else 0
        if node.target in (aten.full.default, aten.full_like.default):
            fill = node.args[1]
        return e.constant(node, fill)


@rule(aten.copy.default)
class Copy(Rule):
    """``x[...] = y`` after functionalisation: y in the dtype of x."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        POINTWISE.infer(layouts, node)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        source = e.operand(node.args[1], shape(node), e.layouts[node].vocab, rowmap)
        if value(node.args[1]).dtype == value(node).dtype:
            return source
        return e.call(prims.convert_element_type.default, source, value(node).dtype)
