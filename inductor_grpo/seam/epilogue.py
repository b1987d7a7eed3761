"""What is computed of a stage's totals: divided, weighted, added up to the loss.

A total is known at the end of the call that takes it, and the arithmetic on a handful of numbers that follows would be
a kernel of its own, all of whose time is its launch.  So the call does it too.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx as fx

from ..graph import is_one, is_tensor, shape, target_of, value
from .calls import CONSTANTS, Calls, call_of
from .expressions import Unsupported, Value, expression
from .program import accumulator
from .sums import is_view
from .terms import Terms


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
    ``late``     the nodes of the backward, where the stage is if ``is_late``
    """

    def __init__(
        self,
        terms: Terms,
        totals: dict[fx.Node, str],
        waiting: Collection[fx.Node],
        late: Collection[fx.Node],
        is_late: bool,
    ) -> None:
        self.terms, self.waiting, self.late, self.is_late = terms, waiting, late, is_late
        self.device = value(terms.ids.node).device
        self.names: dict[fx.Node, str] = {}
        self.calls = Calls("e")
        self._constants: dict[fx.Node, str] = {}
        order = list(dict.fromkeys(totals.values()))
        for node, term in totals.items():
            name, dtype = f"z{order.index(term)}", value(node).dtype
            self.names[node] = name if accumulator(terms.dtype_of(term)) == dtype else self.calls.cast(name, dtype)
        work = list(totals)
        while work:
            for user in work.pop().users:
                if user in self.names or not self._is_ready(user):
                    continue
                if (written := self._write(user)) is not None:
                    self.names[user] = written
                    work.append(user)

    def outputs(self) -> dict[fx.Node, str]:
        """The values that something else reads, with their names."""
        return {node: name for node, name in self.names.items() if node.users.keys() - self.names.keys()}

    def _is_ready(self, node: fx.Node) -> bool:
        if not is_tensor(node) or not all(map(is_one, shape(node))) or (node in self.late) != self.is_late:
            return False
        known_target = is_view(node) or self.terms.supported(str(target_of(node)))
        if node.op != "call_function" or not known_target or value(node).device != self.device:
            return False
        return all(a in self.names or self._is_input(a) for a in node.all_input_nodes)

    def _is_input(self, node: fx.Node) -> bool:
        if node in self.waiting or (node in self.late and not self.is_late):
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
        return self.calls.add(call.target, call.args, call.kwargs, value(node).dtype)

    def _named(self, node: fx.Node) -> str:
        if node in self.names:
            return self.names[node]
        if target_of(node) in CONSTANTS:
            if node not in self._constants:
                self._constants[node] = self.calls.constant(node)
            return self._constants[node]
        return self.terms.scalar_input(node)
