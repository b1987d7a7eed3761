"""Row values that come late, taken out of the sums over the vocabulary that they stand in.

Where ranks hold parts of the vocabulary, a row's maximum and its sum of exponentials are known after a collective:

    m = all_reduce(z.amax(-1), MAX);  s = all_reduce((z - m).exp().sum(-1), SUM);  p = all_reduce(z[label] - m, SUM)

As it stands, each collective needs all rows of the sum before it, so each sum would compute the logits once more.  But
``sum(exp(z - m)) = sum(exp(z - l)) * exp(l - m)`` with the maximum ``l`` of this rank's part, and an element of
``z - m`` is an element of ``z``, less ``m``.  What is left under the sums needs the logits alone, so one program gives
it, and the collectives stay as the user wrote them: as many, in their order, each over all rows.

A value is taken apart into terms ``wide * late``: a vocabulary-sized factor that the head's own program computes, and
factors of a row that come later.  It is done in float32 where the user's dtype is lower.  What does not fall apart so
stays as it is, and costs a program of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from .components import Component
from .graph import (
    GraphBuilder,
    arg,
    aten,
    is_one,
    is_tensor,
    map_args,
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
from .layout import Layouts
from .rules import RULES, is_pointwise
from .rules.indexing import counts_rows, index_list
from .rules.reductions import along_vocabulary
from .rules.views import Identity, View

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
MOST_TERMS = 6


def separate(builder: GraphBuilder, layouts: Layouts, components: list[Component], depths: dict[fx.Node, int]) -> bool:
    """Replaces row values that wait for other row values by ones that do not, in place; True when there were any.

    ``depths`` are those of all nodes (:func:`inductor_grpo.depth.node_depths`).  The graph is unsorted afterwards."""
    found = False
    for component in components:
        wide = [n for n in component.nodes if n in depths and layouts.is_wide(n)]
        starts: dict[int, int] = {}
        for node in wide:
            space = layouts[node].space
            starts[space] = min(starts.get(space, depths[node]), depths[node])
        for node in [n for n in builder.graph.nodes if n in component.nodes and n in depths]:
            layout = layouts.get(node)
            if layout is None or layouts.is_wide(node) or layout.space not in starts:
                continue
            start = starts[layout.space]
            if depths[node] > start and _leaves(layouts, depths, node):
                found |= _Row(builder, layouts, component, depths, start).replace(node)
    return found


def _leaves(layouts: Layouts, depths: dict[fx.Node, int], node: fx.Node) -> bool:
    """Something reads this row value that is not computed in the same program, or that later programs compute again."""
    work, seen = [node], {node}
    while work:
        x = work.pop()
        for user in x.users:
            known = layouts.get(user)
            if known is None or known.space != layouts[x].space:
                if not layouts.is_wide(x):
                    return True
            elif depths.get(user) != depths[node]:
                return True
            elif user not in seen:
                seen.add(user)
                work.append(user)
    return False


@dataclasses.dataclass(frozen=True)
class _Term:
    """``wide``, or 1 for each column where it is None, times or divided by the ``late`` values of the row, in order."""

    wide: fx.Node | None
    late: tuple[tuple[Any, fx.Node], ...] = ()


class _Row:
    """Takes the row values of one component apart; ``start`` is the depth of its logits.

    New nodes have two dimensions: ``[R, V]``, ``[R, 1]``, or 0-dim where the user's operand was."""

    def __init__(
        self, b: GraphBuilder, layouts: Layouts, component: Component, depths: dict[fx.Node, int], start: int
    ) -> None:
        self.b, self.layouts, self.component, self.depths, self.start = b, layouts, component, depths, start
        self._shifted: set[fx.Node] = set()

    def replace(self, node: fx.Node) -> bool:
        """Replaces a sum over the vocabulary or picked elements; False where it does not fall apart."""
        target = target_of(node)
        result: fx.Node | None = None
        if target is aten.sum.dim_IntList and along_vocabulary(self.layouts, node):
            result = self._sum(node)
        elif target is aten.gather.default:
            result = self._gather(node)
        elif target in (aten.index.Tensor, aten._unsafe_index.Tensor):
            result = self._element(node)
        if result is None:
            return False
        result = self.b.view(result, shape(node))
        if value(result).dtype != value(node).dtype:
            result = self.b.call(prims.convert_element_type.default, result, value(node).dtype)
        node.replace_all_uses_with(result)
        result.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        return True

    # Operands in two dimensions

    def _usable(self, x: Any) -> bool:
        """A vocabulary-sized node that has its vocabulary last."""
        return (
            self.layouts.is_wide(x) and x not in self.layouts.conflicts and self.layouts[x].vocab == len(shape(x)) - 1
        )

    def _wide(self, x: fx.Node) -> fx.Node:
        """``[R, V]`` of a node at the depth of the logits."""
        return self._new(self.b.view(x, [numel(shape(x)[:-1]), shape(x)[-1]]), x)

    def _new(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Gives a new node of the region the row space of another."""
        if node not in self.layouts:
            self.layouts.set(node, self.layouts[like].space, None if is_one(shape(node)[1]) else 1)
            self.component.nodes.add(node)
        return node

    def _rows(self, a: fx.Node, x: fx.Node) -> fx.Node | None:
        """``[R, 1]`` of an operand of ``x`` that is the same for a whole row, 0-dim of a number; None for others."""
        if not shape(a):
            return a
        a = self._unspread(a)
        own, sizes = right_aligned(shape(a), len(shape(x))), shape(x)
        if len(own) != len(sizes) or not is_one(own[-1]):
            return None
        if not all(is_one(s) or same(s, t) for s, t in zip(own[:-1], sizes)):
            return None
        rows = self.b.view(a, own)
        if not same_sizes(own[:-1], sizes[:-1]):
            rows = self.b.call(aten.expand.default, rows, self.b.dims([*sizes[:-1], 1]))
        return self.b.view(rows, [numel(sizes[:-1]), 1])

    def _unspread(self, a: fx.Node) -> fx.Node:
        """What a broadcast to the vocabulary repeats."""
        if target_of(a) is aten.full.default and isinstance(a.args[1], (int, float)):
            return self.b.full([1, 1], a.args[1], value(a).dtype, value(a).device)
        if target_of(a) is aten.expand.default and shape(a.args[0]) and is_one(shape(a.args[0])[-1]):
            return node_arg(a, 0)
        return a

    # Picked elements: pointwise operations commute with picking, bit by bit

    def _gather(self, node: fx.Node) -> fx.Node | None:
        x, index = node_arg(node, 0), node_arg(node, 2)
        if not self._usable(x) or self.layouts[node].space != self.layouts[x].space:
            return None
        if not same_sizes(shape(index)[:-1], shape(x)[:-1]) or self.depths[index] > self.start:
            return None
        return self._pick(x, self.b.view(index, [numel(shape(index)[:-1]), shape(index)[-1]]))

    def _element(self, node: fx.Node) -> fx.Node | None:
        x, indices = node_arg(node, 0), index_list(node)
        if not self._usable(x) or self.layouts[node].space != self.layouts[x].space:
            return None
        column = indices[-1]
        if column is None or not counts_rows(indices, shape(x), len(indices) - 1):
            return None
        if not same_sizes(shape(column), shape(node)) or self.depths[column] > self.start:
            return None
        b, index = self.b, self.b.view(column, [numel(shape(column)), 1])
        from_end = b.call(aten.add.Tensor, index, b.dim(shape(x)[-1]))
        return self._pick(x, b.call(aten.where.self, b.call(aten.lt.Scalar, index, 0), from_end, index))

    def _pick(self, x: fx.Node, index: fx.Node) -> fx.Node | None:
        """``[R, K]``: elements ``index`` of each row of ``x``."""
        if not self._usable(x):
            return None
        if self.depths[x] <= self.start:
            return self._new(self.b.call(aten.gather.default, self._wide(x), 1, index), x)
        if isinstance(RULES.get(x.target), (Identity, View)):
            return self._pick(node_arg(x, 0), index)
        if not is_pointwise(x.target):
            return None
        found: dict[fx.Node, fx.Node] = {}
        for a in x.all_input_nodes:
            if not is_tensor(a):
                found[a] = a
                continue
            part = self._rows(a, x)
            if part is None and same_sizes(shape(a), shape(x)):
                part = self._pick(a, index)
            if part is None:
                return None
            found[a] = part
        args, kwargs = map_args(x, found.__getitem__)
        return self.b.call(x.target, *args, **kwargs)

    # Sums over the vocabulary

    def _sum(self, node: fx.Node) -> fx.Node | None:
        x = node_arg(node, 0)
        if not value(x).dtype.is_floating_point or not self._usable(x):
            return None
        terms = self._terms(x)
        if terms is None or any(t.wide is None for t in terms):
            return None
        total: fx.Node | None = None
        for term in terms:
            assert term.wide is not None
            part = self._new(self.b.call(aten.sum.dim_IntList, term.wide, [1], True), x)
            for operation, late in term.late:
                part = self.b.call(operation, part, late)
            total = part if total is None else self.b.call(aten.add.Tensor, total, part)
        return total

    def _terms(self, x: fx.Node) -> list[_Term] | None:
        if not self._usable(x) or not is_tensor(x):
            return None
        if self.depths[x] <= self.start:
            return [_Term(self._raised(self._wide(x), x))]
        if isinstance(RULES.get(x.target), (Identity, View)):
            return self._terms(node_arg(x, 0))
        rule = _TERMS.get(x.target)
        terms = rule(self, x) if rule is not None and value(x).dtype.is_floating_point else None
        return terms if terms is not None and len(terms) <= MOST_TERMS else None

    def _raised(self, node: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """In float32 where it is of lower precision."""
        dtype = value(node).dtype
        if not dtype.is_floating_point or dtype.itemsize >= 4:
            return node
        raised = self.b.call(prims.convert_element_type.default, node, torch.float32)
        return raised if like is None else self._new(raised, like)

    def _operand(self, a: Any, x: fx.Node) -> list[_Term] | None:
        """The terms of an operand of ``x``."""
        if not is_tensor(a):
            return None
        if (rows := self._rows(a, x)) is not None:
            return [_Term(None, ((aten.mul.Tensor, self._raised(rows)),))]
        return self._terms(a) if same_sizes(shape(a), shape(x)) else None

    def _cast(self, x: fx.Node) -> list[_Term] | None:
        inner, dtype = node_arg(x, 0), value(x).dtype
        terms = self._terms(inner) if value(inner).dtype.is_floating_point else None
        if terms is None or dtype.itemsize < 8:
            return terms
        return [self._of_wide(t, x, lambda w: self.b.call(prims.convert_element_type.default, w, dtype)) for t in terms]

    def _of_wide(self, term: _Term, x: fx.Node, f: Callable[[fx.Node], fx.Node]) -> _Term:
        """``f``, which is linear, of a term."""
        if term.wide is not None:
            return dataclasses.replace(term, wide=self._new(f(term.wide), x))
        (operation, first), *rest = term.late
        return _Term(None, ((operation, f(first)), *rest))

    def _neg(self, x: fx.Node) -> list[_Term] | None:
        return self._negated(self._terms(node_arg(x, 0)), x)

    def _negated(self, terms: list[_Term] | None, x: fx.Node) -> list[_Term] | None:
        return terms and [self._of_wide(t, x, lambda w: self.b.call(aten.neg.default, w)) for t in terms]

    def _add(self, x: fx.Node) -> list[_Term] | None:
        if len(x.args) != 2 or x.kwargs:
            return None
        left, right = (self._operand(a, x) for a in x.args)
        if x.target is aten.sub.Tensor:
            right = self._negated(right, x)
        return left and right and self._shifted_sum([*left, *right], x)

    def _shifted_sum(self, terms: list[_Term], x: fx.Node) -> list[_Term]:
        """``z + r`` of a vocabulary-sized z and a late r as ``(z - l) + (l + r)``, l the maximum of the row: both are
        small where the sum is, so that their exponentials neither overflow nor vanish."""
        b = self.b
        early = [t.wide for t in terms if t.wide is not None and not t.late]
        late = [t.late[0][1] for t in terms if t.wide is None and len(t.late) == 1]
        rest = [t for t in terms if t.late and (t.wide is not None or len(t.late) > 1)]
        if not early or not late:
            return terms
        z, r = early[0], late[0]
        for more in early[1:]:
            z = self._new(b.call(aten.add.Tensor, z, more), x)
        for more in late[1:]:
            r = b.call(aten.add.Tensor, r, more)
        if z not in self._shifted:
            most = self._new(b.call(aten.amax.default, z, [1], True), x)
            infinite = self._new(b.call(aten.isinf.default, most), x)
            zero = b.full([], 0, value(most).dtype, value(most).device)
            reference = self._new(b.call(aten.where.self, infinite, zero, most), x)
            z = self._new(b.call(aten.sub.Tensor, z, reference), x)
            self._shifted.add(z)
            r = b.call(aten.add.Tensor, r, most)
        return [_Term(z), _Term(None, ((aten.mul.Tensor, r),)), *rest]

    def _mul(self, x: fx.Node) -> list[_Term] | None:
        left, right = x.args
        numbers = [a for a in (left, right) if not isinstance(a, fx.Node)]
        if numbers:
            terms = self._terms(node_arg(x, 0)) if isinstance(left, fx.Node) else None
            return terms and [self._of_wide(t, x, lambda w: self.b.call(x.target, w, right)) for t in terms]
        return self._products(self._operand(left, x), self._operand(right, x), x)

    def _square(self, x: fx.Node) -> list[_Term] | None:
        terms = self._terms(node_arg(x, 0)) if x.args[1] == 2 else None
        return self._products(terms, terms, x)

    def _products(self, ours: list[_Term] | None, theirs: list[_Term] | None, x: fx.Node) -> list[_Term] | None:
        if ours is None or theirs is None:
            return None
        found = []
        for s in ours:
            for t in theirs:
                wide = s.wide or t.wide
                if s.wide is not None and t.wide is not None:
                    wide = self._new(self.b.call(aten.mul.Tensor, s.wide, t.wide), x)
                found.append(_Term(wide, (*s.late, *t.late)))
        return found

    def _div(self, x: fx.Node) -> list[_Term] | None:
        left, right = x.args
        if len(x.args) != 2 or x.kwargs:
            return None
        if not isinstance(right, fx.Node):
            return self._mul(x)
        terms = self._operand(left, x)
        if terms is None or not is_tensor(right):
            return None
        if (rows := self._rows(right, x)) is None:
            return None
        return [dataclasses.replace(t, late=(*t.late, (aten.div.Tensor, self._raised(rows)))) for t in terms]

    def _scatter(self, x: fx.Node) -> list[_Term] | None:
        """One element a row among zeros, the gradient of a picked one: ones there, times what is written."""
        base, index, src = node_arg(x, 0), node_arg(x, 2), node_arg(x, 3)
        b, sizes = self.b, shape(x)
        if target_of(base) is not aten.full.default or base.args[1] != 0 or self.layouts[x].vocab != len(sizes) - 1:
            return None
        if arg(x, 1, "dim") % len(sizes) != len(sizes) - 1 or not same_sizes(shape(index), [*sizes[:-1], 1]):
            return None
        written = self._rows(src, x)
        if self.depths[index] > self.start or written is None or not shape(src):
            return None
        rows, like = numel(sizes[:-1]), value(self._raised(written))
        ones = b.full([rows, 1], 1, like.dtype, like.device)
        zeros = b.full([rows, sizes[-1]], 0, like.dtype, like.device)
        wide = self._new(b.call(aten.scatter_add.default, zeros, 1, b.view(index, [rows, 1]), ones), x)
        return [_Term(wide, ((aten.mul.Tensor, self._raised(written)),))]

    def _exp(self, x: fx.Node) -> list[_Term] | None:
        terms = self._terms(node_arg(x, 0))
        if terms is None:
            return None
        early = [t.wide for t in terms if t.wide is not None and not t.late]
        late = [t.late[0][1] for t in terms if t.wide is None and len(t.late) == 1]
        if len(early) != 1 or len(late) != 1 or len(terms) != 2 or early[0] not in self._shifted:
            return None
        wide = self._new(self.b.call(aten.exp.default, early[0]), x)
        return [_Term(wide, ((aten.mul.Tensor, self.b.call(aten.exp.default, late[0])),))]


_TERMS: dict[Any, Callable[[_Row, fx.Node], list[_Term] | None]] = {
    **dict.fromkeys(_CASTS, _Row._cast),
    aten.neg.default: _Row._neg,
    aten.add.Tensor: _Row._add,
    aten.sub.Tensor: _Row._add,
    aten.mul.Tensor: _Row._mul,
    aten.mul.Scalar: _Row._mul,
    aten.pow.Tensor_Scalar: _Row._square,
    aten.div.Tensor: _Row._div,
    aten.div.Scalar: _Row._div,
    aten.exp.default: _Row._exp,
    aten.scatter_add.default: _Row._scatter,
}
"""How an operation's value falls apart, given that of its operands."""
