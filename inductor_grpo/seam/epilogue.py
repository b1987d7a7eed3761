"""What is computed of a stage's totals: divided, weighted, added up to the loss.

A total is known at the end of the call that takes it, and the arithmetic on a handful of numbers that follows would be
a kernel of its own, all of whose time is its launch.  So the call does it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx as fx

from ..graph import args_of, aten, is_one, is_tensor, shape, target_of, value
from .calls import call_of, literal
from .expressions import Unsupported, Value, expression
from .program import Call, accumulator
from .sums import is_view
from .terms import Terms

_CONSTANTS = (aten.full.default, aten.scalar_tensor.default)


def descendants(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes and all that is computed from them."""
    found, work = set(nodes), list(nodes)
    while work:
        new = work.pop().users.keys() - found
        found |= new
        work += new
    return found


class Epilogue:
    """The calls on the totals of one stage.

    ``totals``   the nodes of the totals, each with the name of what is summed
    ``waiting``  all that depends on a sum or total that no call has taken yet, which this one cannot read
    ``belongs``  whether a node is in the same half of the graph as the stage, ``known`` whether one in a half before
                 it or the same
    """

    def __init__(
        self,
        terms: Terms,
        totals: dict[fx.Node, str],
        waiting: Collection[fx.Node],
        belongs: Callable[[fx.Node], bool],
        known: Callable[[fx.Node], bool],
    ) -> None:
        self.terms, self.waiting, self.belongs, self.known = terms, waiting, belongs, known
        self.device = value(terms.ids.node).device
        self.names: dict[fx.Node, str] = {}
        self.calls: list[Call] = []
        self._constants: dict[fx.Node, str] = {}
        order = list(dict.fromkeys(totals.values()))
        for node, term in totals.items():
            self.names[node] = self._cast(f"z{order.index(term)}", terms.dtype_of(term), value(node).dtype)
        work = list(totals)
        while work:
            for user in work.pop().users:
                if user in self.names or not self._is_ready(user):
                    continue
                name = self._write(user)
                if name is not None:
                    self.names[user] = name
                    work.append(user)

    def outputs(self) -> dict[fx.Node, str]:
        """The values that something else reads, with their names."""
        return {node: name for node, name in self.names.items() if node.users.keys() - self.names.keys()}

    def _is_ready(self, node: fx.Node) -> bool:
        if not is_tensor(node) or not all(map(is_one, shape(node))) or not self.belongs(node):
            return False
        known_target = is_view(node) or self.terms.supported(str(target_of(node)))
        if node.op != "call_function" or not known_target or value(node).device != self.device:
            return False
        return all(a in self.names or self._is_input(a) for a in node.all_input_nodes)

    def _is_input(self, node: fx.Node) -> bool:
        if node in self.waiting or not self.known(node):
            return False
        if isinstance(value(node), torch.SymInt):
            return True
        return is_tensor(node) and all(map(is_one, shape(node))) and not self.terms.is_frozen(node)

    def _write(self, node: fx.Node) -> str | None:
        """The name of what a node computes; None where a kernel cannot."""
        if is_view(node):
            return self._named(node.all_input_nodes[0])
        operands: dict[str, Value] = {}

        def named(a: fx.Node) -> str:
            name = "%" + self._named(a)
            number = isinstance(value(a), torch.SymInt)
            operands[name] = Value(name, torch.int64 if number else value(a).dtype, False, wrapped=number)
            return name

        call = call_of(node, "", named)
        try:
            expression(call, operands)
        except Unsupported:
            return None
        return self._add(call.target, call.args, call.kwargs, value(node).dtype)

    def _named(self, node: fx.Node) -> str:
        if node in self.names:
            return self.names[node]
        if target_of(node) in _CONSTANTS:
            if node not in self._constants:
                number = literal(args_of(node)[-1])
                self._constants[node] = self._add("aten.scalar_tensor.default", (number,), (), value(node).dtype)
            return self._constants[node]
        return self.terms.scalar_input(node)

    def _cast(self, name: str, given: torch.dtype, wanted: torch.dtype) -> str:
        if accumulator(given) == wanted:
            return name
        return self._add("prims.convert_element_type.default", ("%" + name, str(wanted)), (), wanted)

    def _add(self, target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], dtype: torch.dtype) -> str:
        call = Call(f"e{len(self.calls)}", target, args, kwargs, str(dtype).removeprefix("torch."))
        self.calls.append(call)
        return call.name
