"""Taking a scalar gradient out of a sum per segment.

The gradients of the tokens of one loss are all multiples of one number, the gradient of the loss divided by whatever
the loss is divided by.  ``sum(c * x) = c * sum(x)``: without that factor the sum does not wait for the backward, and is
taken together with the forward's own sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from ..graph import GraphBuilder, aten, is_one, is_tensor, node_arg, prims, shape, target_of, value
from .sums import is_view, is_zero


@dataclasses.dataclass
class Product:
    """``factor * rest``: a 0-dim factor and a tensor that does not depend on a tangent; ``rest`` None is all ones."""

    factor: fx.Node
    rest: fx.Node | None


class Hoist:
    """Takes values of the backward (``late``) apart into products."""

    def __init__(self, builder: GraphBuilder, late: set[fx.Node]) -> None:
        self.builder = builder
        self.late = late
        self._known: dict[fx.Node, Product | None] = {}

    def split(self, node: fx.Node) -> Product | None:
        """A value as a product, or None when it is not one."""
        work = [node]
        while work:
            current = work[-1]
            if current in self._known:
                work.pop()
                continue
            missing = [a for a in self._followed(current) if a not in self._known]
            if missing:
                work += missing
                continue
            self._known[current] = self._split(current)
            work.pop()
        return self._known[node]

    def _followed(self, node: fx.Node) -> list[fx.Node]:
        """The operands that must be taken apart first."""
        if _is_scalar(node) or node.op == "placeholder":
            return []
        return [a for a in node.all_input_nodes if a in self.late and is_tensor(a)]

    def _split(self, node: fx.Node) -> Product | None:
        if node not in self.late or not is_tensor(node) or value(node).dtype == torch.float16:
            return None  # half precision may depend on a loss scale that lifts it
        if _is_scalar(node):
            return Product(self.builder.view(node, []), None)
        target = target_of(node)
        if is_view(node) or target is aten.expand.default:
            return self._same(node, 0)
        if target in (aten.neg.default, prims.convert_element_type.default):
            return self._same(node, 0) if value(node).dtype.is_floating_point else None
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            places = [i for i, a in enumerate(node.args) if a in self.late]
            return self._same(node, places[0]) if len(places) == 1 else None
        if target in (aten.div.Tensor, aten.div.Scalar):
            return self._same(node, 0) if node.args[1] not in self.late else None
        if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            return self._joined(node, (0, 1))
        if target is aten.where.self and node.args[0] not in self.late:
            return self._joined(node, (1, 2))
        return None

    def _same(self, node: fx.Node, place: int) -> Product | None:
        """A value that is linear in one operand."""
        inner = self._known[node_arg(node, place)]
        if inner is not None and inner.rest is None and (is_view(node) or target_of(node) is aten.expand.default):
            return Product(inner.factor, self._ones(node))  # Inductor asks for the size of an expanded constant
        return inner and Product(inner.factor, self._rebuilt(node, {place: inner}))

    def _joined(self, node: fx.Node, places: tuple[int, int]) -> Product | None:
        """A value that is linear in two operands together: multiples of one factor, or zero."""
        operands = {p: node.args[p] for p in places}
        parts: dict[int, Product] = {}
        for place, operand in operands.items():
            if not isinstance(operand, fx.Node):
                return None
            if operand in self.late:
                inner = self._known[operand]
                if inner is None:
                    return None
                parts[place] = inner
            elif not is_zero(operand):
                return None
        if len({part.factor for part in parts.values()}) != 1:
            return None
        return Product(next(iter(parts.values())).factor, self._rebuilt(node, parts))

    def _rebuilt(self, node: fx.Node, parts: dict[int, Product]) -> fx.Node:
        args: list[Any] = list(node.args)
        for place, part in parts.items():
            old = node_arg(node, place)
            args[place] = part.rest if part.rest is not None else self._ones(old)
        new = self.builder.call(node.target, *args, **node.kwargs)
        new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        return new

    def _ones(self, like: fx.Node) -> fx.Node:
        return self.builder.full(shape(like), 1, value(like).dtype, value(like).device)


def _is_scalar(node: fx.Node) -> bool:
    return is_tensor(node) and all(map(is_one, shape(node)))
