"""Writing the graph's per-token maths as calls of a segment program.

A value is written in one of three *spaces*: of a token, of a segment (seen by the token through its id), or a scalar.
What is not pointwise in its space is an input of the program, computed before it by Inductor as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.fx as fx

from .._compat import hooks
from ..graph import (
    GraphBuilder,
    Size,
    aten,
    is_one,
    is_tensor,
    numel,
    same,
    same_sizes,
    shape,
    target_of,
    value,
)
from .calls import CONSTANTS, Calls, call_of
from .program import SegmentProgram
from .sums import Ids, gathered, is_view, through_views

Space = Literal["token", "segment", "scalar"]

_COMPARISONS = {getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class Terms:
    """The program of one stage, as far as it is written.

    ``supported`` says which operators (by name) a program may call; with ``fused=False`` it calls none, and each sum is
    an input.  ``negative``: ids may count from the end.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        ids: Ids,
        tokens: Size,
        count: Size,
        supported: Callable[[str], bool],
        negative: bool,
    ):
        self.builder, self.ids, self.count = builder, ids, count
        self.size = tokens
        self.supported, self.negative = supported, negative
        self.inputs: dict[Space, dict[fx.Node, str]] = {"token": {}, "segment": {}, "scalar": {}}
        self.ints: dict[fx.Node, str] = {}
        self.calls = Calls("v")
        self.gathers = 0
        self._known: dict[tuple[fx.Node, Space], str] = {}

    def token(self, node: fx.Node) -> str:
        """The name of a value with one element a token."""
        return self._write(node, "token")

    def scalar_input(self, node: fx.Node) -> str:
        """The name of a value of one element, or of an int, that is computed before the call."""
        if isinstance(value(node), torch.SymInt):
            return self.ints.setdefault(node, f"n{len(self.ints)}")
        return self._input(node, "scalar")

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a value that is written."""
        return self.program([], [name], False).dtype_of(name)

    def program(self, sums: list[str], totals: list[str], wraps: bool) -> SegmentProgram:
        """The program whose outputs are the values of these names."""
        names: dict[Space, tuple[str, ...]] = {
            space: tuple(str(value(node).dtype).removeprefix("torch.") for node in nodes)
            for space, nodes in self.inputs.items()
        }
        needed = self._needed([*sums, *totals])
        calls = tuple(c for c in self.calls if c.name in needed)
        return SegmentProgram(
            names["token"], names["segment"], names["scalar"], calls, tuple(sums), tuple(totals), wraps
        )

    def _needed(self, names: list[str]) -> set[str]:
        needed = set(names)
        for call in reversed(self.calls):
            if call.name in needed:
                used = [*call.args, *(v for _, v in call.kwargs)]
                flat = [a for x in used for a in (x if isinstance(x, tuple) else (x,))]
                needed |= {a[1:] for a in flat if isinstance(a, str) and a.startswith("%")}
        return needed

    # Writing

    def _write(self, node: fx.Node, space: Space) -> str:
        """Without recursion: graphs are deep."""
        work = [(node, space)]
        while work:
            key = work[-1]
            if key in self._known:
                work.pop()
                continue
            operands = self._operands(*key)
            missing = [o for o in operands or () if o not in self._known]
            if missing:
                work += missing
                continue
            self._known[key] = self._input(*key) if operands is None else self._call(*key, operands)
            work.pop()
        return self._known[node, space]

    def _operands(self, node: fx.Node, space: Space) -> list[tuple[fx.Node, Space]] | None:
        """What a value is computed from, each with its space; None when it is an input."""
        if is_view(node) or self._repeats(node):
            source = node.all_input_nodes[0]
            return [(source, "scalar" if self._is_scalar(source) else space)]
        if space == "token" and (table := self._table(node)) is not None:
            return [(table, "segment")]
        target = target_of(node)
        if not isinstance(target, torch._ops.OpOverload) or not self.supported(str(target)):
            return None
        if target in CONSTANTS:
            return [] if all(isinstance(a, (int, float, list)) for a in node.args[-1:]) else None
        found: list[tuple[fx.Node, Space]] = []
        for a in node.all_input_nodes:
            if isinstance(value(a), torch.SymInt):
                continue
            if not is_tensor(a):
                return None
            if self._is_scalar(a):
                if self.is_frozen(a):
                    return None
                found.append((a, "scalar"))
            elif same_sizes(shape(a), shape(node)):
                found.append((a, space))
            else:
                return None
        return found

    def is_frozen(self, scalar: fx.Node) -> bool:
        """A number on the CPU, where a CUDA graph would keep the one that it was captured with."""
        elsewhere = value(scalar).device != value(self.ids.node).device
        return elsewhere and target_of(scalar) not in CONSTANTS and hooks.captures_graphs()

    def _table(self, node: fx.Node) -> fx.Node | None:
        read = gathered(node)
        if read is None or not read[1].same_as(self.ids) or not same(numel(shape(node)), self.size):
            return None
        table = read[0]
        if read[2] and self.negative and not same(numel(shape(table)), self.count):
            return None  # the end of the table is not that of the sums
        return table if self.ids.columns is None or same(numel(shape(table)), self.count) else None

    def _repeats(self, node: fx.Node) -> bool:
        """An expansion of one element, or of nothing."""
        if target_of(node) is not aten.expand.default:
            return False
        source = node.all_input_nodes[0]
        return self._is_scalar(source) or same(numel(shape(source)), numel(shape(node)))

    @staticmethod
    def _is_scalar(node: fx.Node) -> bool:
        return all(map(is_one, shape(node)))

    def _input(self, node: fx.Node, space: Space) -> str:
        sizes = {"token": [self.size], "segment": None, "scalar": []}[space]
        sizes = [numel(shape(node))] if sizes is None else sizes
        source = through_views(node)
        if not same_sizes(shape(source), sizes):
            source = self.builder.view(node, sizes)
        names = self.inputs[space]
        return names.setdefault(source, f"{'tgs'['token segment scalar'.split().index(space)]}{len(names)}")

    def _call(self, node: fx.Node, space: Space, operands: list[tuple[fx.Node, Space]]) -> str:
        if is_view(node) or self._repeats(node):
            return self._known[operands[0]]
        if space == "token" and operands and operands[0][1] == "segment" and gathered(node) is not None:
            self.gathers += 1
            return self._known[operands[0]]
        if node.target in CONSTANTS:
            return self.calls.constant(node)
        spaces = dict(operands)
        wanted = self._compared_as(node)

        def named(a: fx.Node) -> str:
            if isinstance(value(a), torch.SymInt):
                return "%" + self.scalar_input(a)
            name = self._known[a, spaces[a]]
            if wanted is not None and value(a).dtype != wanted:
                name = self.calls.cast(name, wanted)
            return "%" + name

        call = call_of(node, "", named)  # which may add conversions before it
        return self.calls.add(call.target, call.args, call.kwargs, value(node).dtype)

    @staticmethod
    def _compared_as(node: fx.Node) -> torch.dtype | None:
        """In which dtype a comparison takes place; a 0-dim operand does not widen it."""
        if getattr(node.target, "overloadpacket", None) not in _COMPARISONS:
            return None
        operands: list[Any] = [value(a) if isinstance(a, fx.Node) else a for a in node.args[:2]]
        if any(not isinstance(o, (torch.Tensor, int, float, bool)) for o in operands):
            return None
        return torch.result_type(*operands)
