"""Distributions that are stacked and reduced over the stack, as operations of the distributions themselves.

``logsumexp(torch.stack([p, q]), dim=0)`` is how a mixture of two heads' probabilities is written.  The new dimension is
neither rows nor vocabulary.  Its members are followed one by one: a pointwise operation of the stack is one of each
member, a reduction over the new dimension combines the members, and picking one is that member.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from ._compat import fxgraph
from .depth import after_tangent
from .graph import (
    GraphBuilder,
    arg,
    aten,
    is_one,
    is_tensor,
    map_args,
    node_arg,
    prims,
    same_sizes,
    shape,
    target_of,
    value,
)
from .heads import Head
from .parts import VIEWS
from .rules import is_pointwise
from .rules.reductions import reduced_dims

_COMBINE: dict[Any, Any] = {
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
}
_MOST = 8
"""Larger stacks are left alone: each member is a node."""


def unstack(graph: fx.Graph, heads: list[Head]) -> None:
    """Takes apart, in place, the stacks of values as large as the logits of ``heads`` that are reduced over the stack,
    where nothing else reads them."""
    sizes = {str(head.vocabulary) for head in heads}
    if not any(_stacked(n, sizes) for n in graph.nodes):
        return
    builder = GraphBuilder(graph, after_tangent(graph))
    stacks = _Stacks(sizes)
    for node in list(graph.nodes):
        stacks.look_at(node)
    stacks.drop_what_is_read_otherwise()
    if stacks.ends:
        stacks.take_apart(builder, list(graph.nodes))
        fxgraph.sort_topologically(graph)
        graph.eliminate_dead_code()


def _stacked(node: fx.Node, vocabularies: set[str]) -> tuple[int, list[fx.Node]] | None:
    """The new dimension and the members of a ``stack`` of tensors with a vocabulary: a cat of single ones, or a cat
    that is cut in pieces again by a view."""
    cat = node_arg(node, 0) if target_of(node) in VIEWS else node
    if target_of(cat) is not aten.cat.default or not isinstance(cat.args[0], (list, tuple)):
        return None
    parts, dim = [part for part in cat.args[0] if isinstance(part, fx.Node)], arg(cat, 1, "dim", 0)
    if not 2 <= len(parts) == len(cat.args[0]) <= _MOST or not is_tensor(node):
        return None
    sizes, dim = shape(parts[0]), dim % len(shape(cat))
    if any(not same_sizes(shape(part), sizes) for part in parts):
        return None
    if cat is node:
        if not is_one(sizes[dim]):
            return None
        sizes = [*sizes[:dim], *sizes[dim + 1 :]]
    elif not same_sizes(shape(node), [*sizes[:dim], len(parts), *sizes[dim:]]):
        return None
    return (dim, parts) if any(str(size) in vocabularies for size in sizes) else None


class _Stacks:
    """The nodes that hold a stack, with its dimension and size, and the nodes where stacks end."""

    def __init__(self, vocabularies: set[str]) -> None:
        self.vocabularies = vocabularies
        self.of: dict[fx.Node, tuple[int, int]] = {}
        """From the right: the dimension as a negative number."""
        self.ends: set[fx.Node] = set()
        self.roots: dict[fx.Node, list[fx.Node]] = {}
        """What was stacked -> its members."""

    def look_at(self, node: fx.Node) -> None:
        if not is_tensor(node) or node.op != "call_function":
            return
        root = _stacked(node, self.vocabularies)
        if root is not None:
            self.roots[node] = root[1]
            self.of[node] = (root[0] - len(shape(node)), len(root[1]))
            return
        found = {self.of[a] for a in node.all_input_nodes if a in self.of}
        if len(found) != 1:
            return
        dim, count = next(iter(found))
        if is_pointwise(node.target) and all(self._fits(a, dim) for a in node.all_input_nodes):
            self.of[node] = (dim, count)
        elif node.args and node.args[0] in self.of and self._ends(node, dim, count):
            self.ends.add(node)

    def _fits(self, operand: fx.Node, dim: int) -> bool:
        """It is a stack, or the same for all members."""
        if operand in self.of or not is_tensor(operand):
            return operand in self.of
        sizes = shape(operand)
        return len(sizes) < -dim or is_one(sizes[dim])

    @staticmethod
    def _ends(node: fx.Node, dim: int, count: int) -> bool:
        rank = len(shape(node.args[0]))
        if target_of(node) is aten.sum.dim_IntList and count > 2 and value(node).dtype.itemsize < 4:
            return False  # it adds up in float32 and rounds once
        if target_of(node) in _COMBINE:
            return reduced_dims(node) == [dim + rank] and not node.kwargs.get("dtype")
        return target_of(node) is aten.select.int and arg(node, 1, "dim", 0) % rank == dim + rank

    def drop_what_is_read_otherwise(self) -> None:
        """A stack that something else reads is there anyway, and so is what it is made of."""
        every = set(self.of)
        changed = True
        while changed:
            before = len(self.of)
            kept = {n for n in self.of if all(user in self.of or user in self.ends for user in n.users)}
            kept = {n for n in kept if n in self.roots or all(a in kept for a in n.all_input_nodes if a in every)}
            self.of = {n: place for n, place in self.of.items() if n in kept}
            self.ends = {n for n in self.ends if n.args[0] in kept}
            changed = len(self.of) < before

    def take_apart(self, b: GraphBuilder, nodes: list[fx.Node]) -> None:
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            if node in self.of:
                members[node] = self._members(b, node, members)
            elif node in self.ends:
                dim = self.of[node_arg(node, 0)][0]
                node.replace_all_uses_with(_end(b, node, members[node_arg(node, 0)], dim))

    def _members(self, b: GraphBuilder, node: fx.Node, members: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
        if node in self.roots:
            dim, sizes = self.of[node][0] + len(shape(node)), shape(node)
            return [b.view(part, [*sizes[:dim], 1, *sizes[dim + 1 :]]) for part in self.roots[node]]

        def member(index: int) -> fx.Node:
            args, kwargs = map_args(node, lambda a: members[a][index] if a in members else a)
            made = b.call(node.target, *args, **kwargs)
            made.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
            return made

        return [member(index) for index in range(self.of[node][1])]


def _end(b: GraphBuilder, node: fx.Node, members: list[fx.Node], dim: int) -> fx.Node:
    """The node from the members; each still has the dimension of the stack, with one element."""
    if target_of(node) is aten.select.int:
        result, keeps = members[arg(node, 2, "index")], False
    else:
        if value(members[0]).dtype != value(node).dtype:  # a sum of booleans counts
            members = [b.call(prims.convert_element_type.default, m, value(node).dtype) for m in members]
        combine: Callable[[fx.Node, fx.Node], fx.Node] = functools.partial(b.call, _COMBINE[target_of(node)])
        result, keeps = functools.reduce(combine, members), len(shape(node)) == len(shape(node.args[0]))
    result.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
    return result if keeps else b.view(result, shape(node))
