"""What the values of several pieces are pieces of.

*Parts* are isomorphic values of the pieces of a loop, in order, joined along a dimension or stacked along a new one in
front.  Their *whole* is found operation by operation: the whole of a sum is the sum of the wholes of its operands, and
at the leaves stand tensors that were cut up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from .graph import GraphBuilder, Size, arg, aten, is_one, is_tensor, node_arg, numel, same, shape, target_of, value
from .rules import is_pointwise
from .rules.reductions import reduced_dims

_REDUCTIONS = {
    aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.mean.dim, aten.logsumexp.default, aten.any.dim,
    aten.all.dim, aten.argmax.default, aten.argmin.default,
}  # fmt: skip
_ALONG_A_DIM = {
    aten.gather.default, aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten._softmax.default,
    aten._log_softmax.default, aten.cumsum.default, aten.slice.Tensor,
}  # fmt: skip
VIEWS = (aten.view.default, aten.reshape.default)
_OF_SIZES = (*VIEWS, aten.expand.default)
"""Whose second argument is a size: pieces may differ in it."""
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


@dataclasses.dataclass(frozen=True)
class Parts:
    """Values of the pieces; ``dim`` counts the new dimension in front, if they are ``stacked`` along one."""

    nodes: tuple[fx.Node, ...]
    dim: int
    stacked: bool = False

    def rank(self) -> int:
        return len(shape(self.nodes[0])) + self.stacked

    def sizes(self, node: fx.Node) -> list[Size]:
        return [1] * self.stacked + list(shape(node))

    def lengths(self) -> list[Size]:
        """The pieces' sizes along ``dim``."""
        return [self.sizes(node)[self.dim] for node in self.nodes]

    def of(self, nodes: Sequence[fx.Node], dim: int) -> Parts:
        return dataclasses.replace(self, nodes=tuple(nodes), dim=dim)

    def whole_sizes(self) -> list[Size]:
        lengths, sizes = self.lengths(), self.sizes(self.nodes[0])
        total = lengths[0]
        for length in lengths[1:]:
            total = total + length
        return [*sizes[: self.dim], total, *sizes[self.dim + 1 :]]


class Wholes:
    """Finds the whole of parts, and makes it where the graph has none."""

    def __init__(self, builder: GraphBuilder, wide: set[fx.Node]) -> None:
        self.builder = builder
        self.wide = wide
        """What is as large as logits, of the graph and of what was added."""
        self.known: dict[Parts, fx.Node | None] = {}

    def of(self, parts: Parts) -> fx.Node | None:
        """The node that ``parts`` are the pieces of, made where the graph has none; None where there can be none."""
        if parts not in self.known:
            self.known[parts] = None
            found = self._whole(parts)
            if found is not None and value(found).dtype != value(parts.nodes[0]).dtype:
                found = None  # a piece may have been a number, which promotes otherwise
            self.known[parts] = found
            if found is not None and any(n in self.wide for n in parts.nodes):
                self.wide.add(found)
        return self.known[parts]

    def _whole(self, parts: Parts) -> fx.Node | None:
        first = parts.nodes[0]
        if any(n.op != "call_function" or not is_tensor(n) for n in parts.nodes):
            return None
        if (base := self._base(parts)) is not None:
            return base
        target = target_of(first)
        if any(target_of(n) is not target or len(shape(n)) != len(shape(first)) for n in parts.nodes):
            return None
        if target is aten.full.default:
            fill = {repr(n.args[1]) for n in parts.nodes}
            like = value(first)
            whole = self.builder.full(parts.whole_sizes(), first.args[1], like.dtype, like.device)
            return whole if len(fill) == 1 else None
        if any(len(n.args) != len(first.args) or n.kwargs != first.kwargs for n in parts.nodes):
            return None
        if is_pointwise(target):
            return self._pointwise(parts)
        if target not in _OF_SIZES and any(repr(n.args[1:2]) != repr(first.args[1:2]) for n in parts.nodes):
            return None  # along other dimensions in each piece
        if target in _REDUCTIONS:
            return self._reduction(parts)
        if target in _ALONG_A_DIM:
            return self._along(parts)
        return self._view(parts)

    def _base(self, parts: Parts) -> fx.Node | None:
        """The tensor that the parts were cut from."""
        if (split := _split(parts.nodes)) is not None:
            base, dim = node_arg(split, 0), arg(split, 1 if target_of(split) is aten.unbind.int else 2, "dim", 0)
            cut_so = (target_of(split) is aten.unbind.int) == parts.stacked
            return base if cut_so and dim % len(shape(base)) == parts.dim else None
        if not parts.stacked:
            return self.builder.uncut(parts.nodes, parts.dim)
        if any(target_of(n) is not aten.select.int or n.args[0] is not parts.nodes[0].args[0] for n in parts.nodes):
            return None
        base = node_arg(parts.nodes[0], 0)
        if any(arg(n, 1, "dim") % len(shape(base)) != 0 for n in parts.nodes):
            return None
        count = len(parts.nodes)
        if [arg(n, 2, "index") for n in parts.nodes] != list(range(count)):
            return None
        # Labels may have a number of sequences of their own, of which the loop over the logits reads the first.
        return base if same(shape(base)[0], count) else self.builder.slice(base, 0, 0, count)

    def _operand(self, parts: Parts, place: int) -> Any:
        """An operand of the whole, broadcast against it as the parts' operands are; None where there is none."""
        given: list[Any] = [n.args[place] for n in parts.nodes]
        if not all(isinstance(a, fx.Node) and is_tensor(a) for a in given):
            return given[0] if all(a is given[0] or repr(a) == repr(given[0]) for a in given) else None
        rank = len(shape(given[0]))
        missing = len(shape(parts.nodes[0])) - rank
        own = 0 if parts.stacked else parts.dim - missing
        constant = target_of(given[0]) is aten.full.default
        if all(a is given[0] for a in given) and (parts.stacked or own < 0 or is_one(shape(given[0])[own])):
            return given[0]  # every piece reads all of it
        if (all(a is given[0] for a in given) and not constant) or own < 0:
            return None
        inner = parts.of(given, own)
        if not all(map(same, inner.lengths(), parts.lengths())):
            return None
        whole = self.of(inner)
        if whole is None or not parts.stacked or missing == 0:
            return whole
        return self.builder.view(whole, [shape(whole)[0], *[1] * missing, *shape(whole)[1:]])

    def _pointwise(self, parts: Parts) -> fx.Node | None:
        first = parts.nodes[0]
        args = []
        for place, given in enumerate(first.args):
            args.append(self._operand(parts, place))
            if args[-1] is None and given is not None:
                return None
        whole = self.builder.call(first.target, *args, **first.kwargs)
        return whole if same(numel(shape(whole)), numel(parts.whole_sizes())) else None

    def _reduction(self, parts: Parts) -> fx.Node | None:
        first = parts.nodes[0]
        if len(first.args) < 2 or first.args[1] in (None, []) or any(n.args[1:] != first.args[1:] for n in parts.nodes):
            return None
        dims = [d + parts.stacked for d in reduced_dims(first)]
        operand = node_arg(first, 0)
        keeps = len(shape(operand)) == len(shape(first))
        kept = [d for d in range(len(shape(operand)) + parts.stacked) if keeps or d not in dims]
        if kept[parts.dim] in dims:
            return None
        whole = self.of(parts.of([node_arg(n, 0) for n in parts.nodes], kept[parts.dim]))
        if whole is None:
            return None
        given = dims[0] if isinstance(first.args[1], int) else dims
        return self.builder.call(first.target, whole, given, *first.args[2:], **first.kwargs)

    def _along(self, parts: Parts) -> fx.Node | None:
        """Operations along another dimension whose tensors are all cut alike."""
        first = parts.nodes[0]
        dim = arg(first, 1, "dim", 0) % len(shape(first)) + parts.stacked
        if dim == parts.dim:
            return None
        args: list[Any] = []
        for place, given in enumerate(first.args):
            operands: list[Any] = [n.args[place] for n in parts.nodes]
            if isinstance(given, fx.Node) and is_tensor(given):
                inner = parts.of(operands, parts.dim)
                # Only the last piece's index may be shorter than its table: in the middle it would shift the rest.
                aligned = all(map(same, inner.lengths()[:-1], parts.lengths()[:-1]))
                args.append(self.of(inner) if aligned else None)
                if args[-1] is None:
                    return None
            elif any(repr(a) != repr(given) for a in operands):
                return None
            else:
                args.append(dim if place == 1 else given)
        return self.builder.call(first.target, *args, **first.kwargs)

    def _view(self, parts: Parts) -> fx.Node | None:
        first = parts.nodes[0]
        target, b, stacked = target_of(first), self.builder, int(parts.stacked)
        if not first.args or not isinstance(first.args[0], fx.Node) or not is_tensor(first.args[0]):
            return None
        inner = [node_arg(n, 0) for n in parts.nodes]
        rank = len(shape(inner[0])) + stacked

        def whole(dim: int) -> fx.Node | None:
            return self.of(parts.of(inner, dim))

        if target in (aten.clone.default, aten.alias.default):
            return whole(parts.dim)
        if target is aten.unsqueeze.default:
            at = arg(first, 1, "dim") % len(shape(first)) + stacked
            if at == parts.dim:
                new = self.of(Parts(tuple(inner), 0, stacked=True))
                return None if new is None else b.permute(new, [*range(1, at + 1), 0, *range(at + 1, rank + 1)])
            new = whole(parts.dim - (at < parts.dim))
            return None if new is None else b.call(target, new, at)
        if target in (aten.squeeze.dim, aten.squeeze.dims) and len(shape(first)) < len(shape(inner[0])):
            given = arg(first, 1, "dim")
            dims = [d % len(shape(inner[0])) + stacked for d in ([given] if isinstance(given, int) else given)]
            kept = [d for d in range(rank) if d not in dims]
            if len(kept) != parts.rank():
                return None  # one of them is larger than 1, and stays
            new = whole(kept[parts.dim])
            return None if new is None else b.call(target, new, dims[0] if isinstance(given, int) else dims)
        if target is aten.permute.default:
            order = [*range(stacked), *(d % len(shape(first)) + stacked for d in arg(first, 1, "dims"))]
            new = whole(order[parts.dim])
            return None if new is None else b.permute(new, order)
        if target is aten.expand.default:
            operand = self._operand(parts, 0)
            return None if operand is None else b.call(target, operand, b.dims(parts.whole_sizes()))
        if target in VIEWS:
            return self._reshaped(parts, inner)
        return None

    def _reshaped(self, parts: Parts, inner: list[fx.Node]) -> fx.Node | None:
        """A view that keeps the dimension along which the parts are cut, or flattens into it what lies behind it."""
        sizes, old = parts.sizes(parts.nodes[0]), parts.sizes(inner[0])
        for dim in range(len(old)):
            outer = same(numel(old[:dim]), numel(sizes[: parts.dim]))
            if not outer or not all(map(same, parts.of(inner, dim).lengths(), parts.lengths())):
                continue
            whole = self.of(parts.of(inner, dim))
            if whole is not None:
                return self.builder.view(whole, parts.whole_sizes())
        return None


def _split(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The operation of which the nodes are all results, in order."""
    split = nodes[0].args[0]
    if target_of(split) not in _SPLITS or not isinstance(split, fx.Node) or len(nodes) != len(value(split)):
        return None
    return split if all(n.args == (split, place) for place, n in enumerate(nodes)) else None
