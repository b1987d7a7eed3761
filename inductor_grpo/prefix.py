"""Row values of a prefix of the rows, computed on all rows.

When the sizes of hidden and of the labels became symbolic one by one, nobody knows that they are equal: the log-probs
are those of the first rows, and their gradient is padded with zeros to all of them.  Between the two, the loss works on
tensors whose size is another symbol.  The same maths on padded tensors has the rows of the logits, so it can run in
their chunks; what it gives on the padding is replaced by zero at the end.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from .graph import (
    GraphBuilder,
    Size,
    arg,
    aten,
    is_one,
    is_tensor,
    node_arg,
    numel,
    right_aligned,
    same,
    same_sizes,
    shape,
    target_of,
    value,
)
from .layout import Layouts
from .rules import is_pointwise
from .rules.reductions import reduced_dims

_SAME_TENSOR = (aten.clone.default, aten.alias.default)


class Prefixes:
    """Computes values of the first rows of a region on all of its rows."""

    def __init__(self, builder: GraphBuilder, layouts: Layouts) -> None:
        self._builder = builder
        self._layouts = layouts
        self._known: dict[Any, fx.Node | None] = {}
        self._from_region: dict[fx.Node, bool] = {}
        self._full: dict[str, Size] = {}
        cut: set[fx.Node] = set()
        for node in builder.graph.nodes:
            if _is_prefix(node) and (node.args[0] in cut or layouts.space_of(node_arg(node, 0)) is not None):
                cut.add(node)
                for own, whole in zip(shape(node), shape(node_arg(node, 0))):
                    if not same(own, whole):
                        self._full[str(own)] = whole

    def padded(self, pad: fx.Node, x: fx.Node) -> fx.Node | None:
        """``pad``, which pads a row value with zeros at its end, of ``x`` instead; None where it cannot be done."""
        pads: Any = arg(pad, 1, "pad")
        starts_at_zero = all(isinstance(p, int) and p == 0 for p in pads[::2])
        if not starts_at_zero or arg(pad, 2, "value", 0) != 0 or not self._comes_from_region(x):
            return None
        return self._masked(x, shape(pad))

    def _masked(self, x: fx.Node, sizes: list[Size]) -> fx.Node | None:
        whole = self._on_all(x, sizes)
        if whole is None:
            return None
        b = self._builder
        present: fx.Node | None = None
        for dim, (own, full) in enumerate(zip(shape(x), sizes)):
            if same(own, full):
                continue
            iota = b.view(b.iota(full, value(x).device), [full if d == dim else 1 for d in range(len(sizes))])
            flags = b.call(aten.lt.Scalar, iota, b.dim(own))
            present = flags if present is None else b.call(aten.logical_and.default, present, flags)
        if present is None:
            return whole
        zero = b.full([], 0, value(x).dtype, value(x).device)
        return self._call(aten.where.self, present, whole, zero)

    def _on_all(self, x: fx.Node, sizes: list[Size]) -> fx.Node | None:
        """``x`` in the shape ``sizes``, with anything beyond its own rows."""
        if same_sizes(shape(x), sizes):
            return x
        key = (x, tuple(map(str, sizes)))
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._compute(x, sizes)
        return self._known[key]

    def _compute(self, x: fx.Node, sizes: list[Size]) -> fx.Node | None:
        if not self._comes_from_region(x):
            return self._pad(x, sizes)
        target, inner = target_of(x), x.args[0] if x.args else None
        if not isinstance(inner, fx.Node):
            return None
        if _is_prefix(x) or target in _SAME_TENSOR:
            return self._on_all(inner, sizes)
        if target is aten.unsqueeze.default:
            dim = arg(x, 1, "dim") % len(sizes)
            source = self._on_all(inner, sizes[:dim] + sizes[dim + 1 :])
            return None if source is None else self._call(target, source, dim)
        if target is aten.squeeze.dim and len(shape(inner)) == len(sizes) + 1:
            dim = arg(x, 1, "dim") % len(shape(inner))
            source = self._on_all(inner, [*sizes[:dim], 1, *sizes[dim:]])
            return None if source is None else self._call(target, source, dim)
        if target is aten.expand.default:
            own = right_aligned(shape(inner), len(sizes))
            wanted = [1 if is_one(s) else size for s, size in zip(own, sizes)][len(sizes) - len(shape(inner)) :]
            source = self._on_all(inner, wanted)
            return None if source is None else self._call(target, source, self._builder.dims(sizes))
        if target is aten.sum.dim_IntList:
            return self._sum(x, inner, sizes)
        return self._pointwise(x, sizes) if is_pointwise(x.target) else None

    def _pointwise(self, x: fx.Node, sizes: list[Size]) -> fx.Node | None:
        found: dict[fx.Node, fx.Node] = {}
        for a in x.all_input_nodes:
            if not is_tensor(a):
                return None
            rank = len(shape(a))
            own = right_aligned(shape(a), len(sizes))
            if not all(is_one(s) or same(s, t) for s, t in zip(own, shape(x))):
                return None
            wanted = [1 if is_one(s) else size for s, size in zip(own, sizes)][len(sizes) - rank :]
            source = self._on_all(a, wanted)
            if source is None:
                return None
            found[a] = source
        args, kwargs = fx.map_arg((x.args, x.kwargs), lambda a: found[a])
        return self._call(x.target, *args, **kwargs)

    def _sum(self, x: fx.Node, inner: fx.Node, sizes: list[Size]) -> fx.Node | None:
        kwargs = {k: v for k, v in x.kwargs.items() if k == "dtype"}
        dims, keeps = reduced_dims(x), bool(arg(x, 2, "keepdim", False))
        rest = iter([s for d, s in enumerate(sizes) if not (keeps and d in dims)])
        wanted = [self._full.get(str(s), s) if d in dims else next(rest) for d, s in enumerate(shape(inner))]
        source = self._masked(inner, wanted)
        return None if source is None else self._call(x.target, source, dims, keeps, **kwargs)

    def _pad(self, x: fx.Node, sizes: list[Size]) -> fx.Node:
        b, pads = self._builder, []
        for own, full in reversed(list(zip(shape(x), sizes))):
            pads += [0, 0 if same(own, full) else b.dim(full - own)]
        fill: Any = False if not value(x).is_floating_point() else 0
        return b.call(aten.constant_pad_nd.default, x, pads, fill)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, with the row space of the row values that it is computed from."""
        node = self._builder.call(target, *args, **kwargs)
        self._from_region[node] = True
        for a in node.all_input_nodes:
            layout = self._layouts.get(a)
            if layout is not None and layout.vocab is None and same(numel(shape(a)), numel(shape(node))):
                self._layouts.set(node, layout.space, None)
                break
        return node

    def _comes_from_region(self, x: fx.Node) -> bool:
        work = [x]
        while work:
            node = work[-1]
            if node in self._from_region:
                work.pop()
            elif self._layouts.space_of(node) is not None:
                self._from_region[node] = True
            else:
                inputs = [a for a in node.all_input_nodes if is_tensor(a)]
                unknown = [a for a in inputs if a not in self._from_region]
                if unknown:
                    work += unknown
                else:
                    self._from_region[node] = any(self._from_region[a] for a in inputs)
        return self._from_region[x]


def _is_prefix(node: fx.Node) -> bool:
    """The first so many rows of a tensor."""
    if target_of(node) is not aten.slice.Tensor or arg(node, 4, "step", 1) != 1:
        return False
    start = arg(node, 2, "start")
    return start is None or (isinstance(start, int) and start == 0)
