"""Reductions and scans along the vocabulary."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, cast

import torch.fx as fx

from ..graph import arg, aten, is_one, node_arg, prims, shape, target_of
from ..layout import Layouts
from ..rowmap import RowMap
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter

# Where each operation takes its dimensions, and what follows them in a call with dim=1, keepdim=True.
_DIM_POSITION: dict[Any, int] = {aten.linalg_vector_norm.default: 2}
_ONE_DIM = {
    aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.any.dim, aten.all.dim, aten.cumsum.default,
    aten.cumprod.default, aten.logcumsumexp.default, aten._softmax.default, aten._log_softmax.default,
    aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default, aten.sort.stable, aten.cummax.default,
}  # fmt: skip
WHOLE = {
    aten.sum.default, aten.mean.default, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default,
    aten.any.default, aten.all.default,
}  # fmt: skip


def reduced_dims(node: fx.Node) -> list[int]:
    """The dimensions that a reduction or scan runs over, counted from the front."""
    rank = len(shape(node.args[0]))
    if node.target in WHOLE and node.target not in (aten.amax.default, aten.amin.default):
        dims: Any = None
    elif node.target is aten.topk.default:
        dims = arg(node, 2, "dim", -1)
    elif node.target is aten.sort.stable:
        dims = arg(node, 2, "dim", -1)
    elif node.target is aten.sort.default:
        dims = arg(node, 1, "dim", -1)
    else:
        dims = arg(node, _DIM_POSITION.get(node.target, 1), "dim")
    if dims is None or dims == []:
        return list(range(rank))
    return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims)) if rank else []


def along_vocabulary(layouts: Layouts, node: fx.Node) -> bool:
    """The operation runs over the vocabulary dimension of a region node and no other."""
    layout = layouts.get(node.args[0])
    return layout is not None and layout.vocab is not None and reduced_dims(node) == [layout.vocab]


@rule(
    aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.mean.dim, aten.logsumexp.default, aten.any.dim,
    aten.any.dims, aten.all.dim, aten.all.dims, aten.argmax.default, aten.argmin.default, aten.prod.dim_int,
    aten.var.correction, aten.std.correction, aten.linalg_vector_norm.default,
)  # fmt: skip
class Reduction(Rule):
    """One value a row."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        if along_vocabulary(layouts, node):
            layouts.set(node, layouts[node_arg(node, 0)].space, None)

    def is_local(self, layouts: Layouts, node: fx.Node) -> bool:
        return along_vocabulary(layouts, node)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        from .indexing import sum_of_one_hot

        x = node_arg(node, 0)
        if node.target is aten.sum.dim_IntList and (element := sum_of_one_hot(e, x, rowmap)) is not None:
            return element
        return self.write(e, node, e.dense(x, rowmap))

    @staticmethod
    def write(e: Emitter, node: fx.Node, x: fx.Node, target: Any = None) -> fx.Node:
        """The same reduction of ``x`` ``[n, C]`` to ``[n, 1]``."""
        target = target or node.target
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dim", "keepdim")}
        if target is aten.linalg_vector_norm.default:
            return e.call(target, x, arg(node, 1, "ord", 2), [1], True, **kwargs)
        if target in (aten.var.correction, aten.std.correction):
            return e.call(target, x, [1], **kwargs, keepdim=True)
        return e.call(target, x, 1 if target in _ONE_DIM else [1], True, **kwargs)


@rule(
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten._softmax.default,
    aten._log_softmax.default, aten.flip.default, prims.rev.default,
)  # fmt: skip
class Scan(Rule):
    """The same shape; each element depends on its own row alone."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        own = layouts.get(node)
        if along_vocabulary(layouts, node):
            layouts.set(node, *layouts[node_arg(node, 0)])
        elif own is not None and own.vocab is not None and reduced_dims(node) == [own.vocab]:
            layouts.set(node.args[0], *own)

    def is_local(self, layouts: Layouts, node: fx.Node) -> bool:
        return along_vocabulary(layouts, node)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        x = e.dense(node_arg(node, 0), rowmap)
        return e.call(node.target, x, 1 if node.target in _ONE_DIM else [1], *node.args[2:], **node.kwargs)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
class SoftmaxBackward(Rule):
    """Gradient and output in, gradient out; all of one layout."""

    @staticmethod
    def _dim(node: fx.Node) -> int:
        return cast(int, node.args[2]) % len(shape(node))

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        dim = self._dim(node)
        for x in (*node.args[:2], node):
            layout = layouts.get(x)
            if layout is not None and layout.vocab == dim:
                for y in (*node.args[:2], node):
                    layouts.set(y, *layout)
                return

    def is_local(self, layouts: Layouts, node: fx.Node) -> bool:
        own = layouts.get(node)
        return own is not None and own.vocab == self._dim(node)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        grad, output = (e.dense(node_arg(node, i), rowmap) for i in (0, 1))
        return e.call(node.target, grad, output, 1, node.args[3])


MULTIPLE = {
    aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default, aten.sort.stable, aten.var_mean.correction,
    aten.cummax.default, aten.cummin.default,
}  # fmt: skip
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


@rule(operator.getitem)
class OneOfSeveral(Rule):
    """One result of an operation with several (max, top-k, sort, var_mean, split)."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        from .selection import split_part

        parent = node_arg(node, 0)
        target = target_of(parent)
        if target in MULTIPLE and along_vocabulary(layouts, parent):
            x = node_arg(parent, 0)
            layout = layouts[x]
            same_rank = len(shape(node)) == len(shape(x))
            keeps = same_rank and layout.vocab is not None and not is_one(shape(node)[layout.vocab])
            layouts.set(node, layout.space, layout.vocab if keeps else None)
        elif target in SPLITS:
            split_part.infer(layouts, node)

    def is_local(self, layouts: Layouts, node: fx.Node) -> bool:
        parent = node_arg(node, 0)
        return target_of(parent) in SPLITS or along_vocabulary(layouts, parent)

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        from .selection import split_part

        parent = node_arg(node, 0)
        if parent.target in SPLITS:
            return split_part.emit(e, node, rowmap)
        x = e.dense(node_arg(parent, 0), rowmap)
        return e.call(operator.getitem, self._several(e, parent, x, rowmap), node.args[1])

    @staticmethod
    def _several(e: Emitter, parent: fx.Node, x: fx.Node, rowmap: RowMap) -> fx.Node:
        target = parent.target
        if target is aten.topk.default:
            k = e.operand(parent.args[1], [], None, rowmap)
            return e.call(target, x, k, 1, arg(parent, 3, "largest", True), arg(parent, 4, "sorted", True))
        if target is aten.sort.default:
            return e.call(target, x, 1, arg(parent, 2, "descending", False))
        if target is aten.sort.stable:
            return e.call(
                target, x, stable=arg(parent, 1, "stable"), dim=1, descending=arg(parent, 3, "descending", False)
            )
        if target is aten.var_mean.correction:
            return e.call(target, x, [1], **{**parent.kwargs, "keepdim": True})
        return (
            e.call(target, x, 1) if target in (aten.cummax.default, aten.cummin.default) else e.call(target, x, 1, True)
        )
