"""Which nodes of a backward are linear in a tangent.

What autograd derives is linear in its tangents, but a hook or a hand-written backward may clip, round or branch on a
gradient.  So linearity is shown node by node, and what no rule covers is taken not to be linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx as fx

from .graph import arg, aten, is_tensor, prims, target_of, value

_OF_FIRST = {
    aten.neg.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.t.default,
    aten.transpose.int, aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.contiguous.default, aten.slice.Tensor, aten.select.int, aten.flip.default, prims.rev.default,
    aten.roll.default, aten.unfold.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    aten.cumsum.default, aten.div.Scalar, aten.mul.Scalar, aten.gather.default, aten.index.Tensor,
    aten.index_select.default, aten.as_strided.default, aten.repeat.default, aten.tril.default, aten.triu.default,
    aten.diagonal.default, aten.split.Tensor, aten.unbind.int,
}  # fmt: skip
"""Linear in their first argument, whatever the others are, as long as these do not depend on the tangent."""
_PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
_WRITES = {
    aten.scatter_add.default: (0, 3), aten.scatter.src: (0, 3), aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1), aten.index_put.default: (0, 2), aten.index_add.default: (0, 3),
    aten.where.self: (1, 2), aten.add.Tensor: (0, 1), aten.sub.Tensor: (0, 1),
}  # fmt: skip
"""Linear in two arguments together: each depends on the tangent or is zero."""
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


def is_linear(node: fx.Node, depends: Collection[fx.Node]) -> bool:
    """``node`` is a linear function of those of its inputs that are in ``depends`` (all together)."""
    target = target_of(node)
    inputs = [a for a in node.all_input_nodes if a in depends]
    first = node.args[0] if node.args else None
    if not is_tensor(node) or not value(node).is_floating_point():
        return False
    if target in _CASTS:
        return inputs == [first] and value(first).is_floating_point()
    if target in _OF_FIRST:
        return inputs == [first] and _count(node, first) == 1
    if target in _PRODUCTS:
        return len(inputs) == 1 and _count(node, inputs[0]) == 1
    if target is aten.div.Tensor:
        return inputs == [first] and _count(node, first) == 1
    if target is aten.cat.default:
        parts: Any = first
        return all(p in depends or _is_zero(p) for p in parts)
    if target is aten.constant_pad_nd.default:
        return inputs == [first] and arg(node, 2, "value", 0) == 0
    if target in (aten.masked_fill.Scalar, aten.scatter.value):
        return inputs == [first] and arg(node, 2 if target is aten.masked_fill.Scalar else 3, "value") == 0
    if target in _WRITES:
        linear = [arg(node, place, _name(target, place)) for place in _WRITES[target]]
        return all(x in depends or _is_zero(x) for x in linear) and sum(_count(node, a) for a in inputs) == sum(
            x in depends for x in linear
        )
    return False


def _name(target: Any, place: int) -> str:
    return target._schema.arguments[place].name


def _count(node: fx.Node, x: Any) -> int:
    """How often an argument occurs in a call."""
    found = 0

    def count(a: fx.Node) -> fx.Node:
        nonlocal found
        found += a is x
        return a

    fx.map_arg((node.args, node.kwargs), count)
    return found


def _is_zero(x: Any) -> bool:
    """A constant of zeros."""
    if isinstance(x, (int, float)):
        return x == 0
    if target_of(x) in (aten.expand.default, aten.view.default, aten.reshape.default):
        return _is_zero(x.args[0])
    if target_of(x) is aten.full.default:
        return not isinstance(x.args[1], fx.Node) and x.args[1] == 0
    return target_of(x) is aten.scalar_tensor.default and x.args[0] == 0


def nonlinear(nodes: Collection[fx.Node], depends: Collection[fx.Node], given: Collection[fx.Node]) -> fx.Node | None:
    """The first of ``nodes`` on the way from ``given`` that is not shown to be linear in them (together); None when all
    are."""
    seen: set[fx.Node] = set(given)
    work = list(nodes)
    while work:
        node = work.pop()
        if node in seen:
            continue
        seen.add(node)
        if not is_linear(node, depends):
            return node
        work += [a for a in node.all_input_nodes if a in depends]
    return None


def dependents(graph: fx.Graph, starts: Callable[[fx.Node], bool]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node the starting nodes that its value depends on; sizes of tensors depend on nothing."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if starts(node):
            found[node] = frozenset({node})
        elif not isinstance(value(node), torch.SymInt):
            found[node] = frozenset().union(*(found.get(a, frozenset()) for a in node.all_input_nodes))
    return found
