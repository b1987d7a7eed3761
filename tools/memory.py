"""Live memory along a graph, from the graph's own sizes.

Only what the graph itself allocates is counted, operation by operation and before any fusion: an upper bound of what a
compiled graph holds, and the same measure for both sides of a rewrite.  A call of a chunk program counts its results
and the logits of one chunk.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from typing import Any, cast

import sympy
import torch
import torch.fx as fx

from inductor_grpo import runtime
from inductor_grpo.canonical import Symbols, program_of
from inductor_grpo.graph import hint

_aten = torch.ops.aten
_KEEPS_STORAGE = {_aten.reshape.default, _aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default}


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes that are live while ``node`` runs, at the run's sizes."""

    node: fx.Node
    live: int
    made: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All moments of a graph; ``formula`` is the peak in the graph's symbolic sizes."""

    moments: list[Moment]
    formula: str

    @property
    def peak(self) -> int:
        """The most that is live at once."""
        return max((m.live for m in self.moments), default=0)

    @property
    def peak_index(self) -> int:
        """Where that is."""
        return max(range(len(self.moments)), key=lambda i: self.moments[i].live, default=0)


def timeline(graph: fx.Graph) -> Timeline:
    """The live memory of a graph in its own order."""
    storages = _storages(graph)
    last = _last_uses(graph, storages)
    held: dict[Any, torch.Tensor] = {}
    moments: list[Moment] = []
    formula, peak = "0", -1
    for index, node in enumerate(graph.nodes):
        new = dict(_made(node))
        held.update(new)
        scratch = _scratch(node)
        live = sum(map(_bytes, held.values())) + scratch
        moments.append(Moment(node, live, sum(map(_bytes, new.values())) + scratch))
        if live > peak:
            formula, peak = _formula([*held.values()], scratch), live
        for key in [k for k in held if last.get(k, -1) <= index]:
            del held[key]
    return Timeline(moments, formula)


def _made(node: fx.Node) -> list[tuple[Any, torch.Tensor]]:
    """The tensors that a node allocates, by storage key."""
    if node.op != "call_function" or node.target is operator.getitem or _is_alias(node):
        return []
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [((node, i), v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]


def _is_alias(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _KEEPS_STORAGE)


def _storages(graph: fx.Graph) -> dict[fx.Node, set[Any]]:
    """The storages that a node's value lies in."""
    found: dict[fx.Node, set[Any]] = {}
    for node in graph.nodes:
        if node.target is operator.getitem:
            parent, index = node.args[0], node.args[1]
            found[node] = {k for k in found[parent] if k[1] == index or k[0] is not parent}
        elif _is_alias(node):
            found[node] = set().union(*(found[a] for a in node.all_input_nodes[:1]))
        else:
            found[node] = {key for key, _ in _made(node)}
    return found


def _last_uses(graph: fx.Graph, storages: dict[fx.Node, set[Any]]) -> dict[Any, int]:
    last: dict[Any, int] = {}
    for index, node in enumerate(graph.nodes):
        for used in (node, *node.all_input_nodes):
            for key in storages[used]:
                last[key] = len(graph.nodes) if node.op == "output" else max(index, last.get(key, 0))
    return last


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.dtype.itemsize * math.prod(map(hint, tensor.shape)))


def _scratch(node: fx.Node) -> int:
    """Bytes of logits that a chunk program holds at once."""
    text = program_of(node)
    if text is None or len(node.args) < 6:
        return 0
    rows, whole, budget = cast("tuple[list[fx.Node], list[fx.Node], int]", (node.args[0], node.args[1], node.args[5]))
    program = json.loads(text)
    total = 0
    for p in program.get("projections", ()):
        hidden, weight = rows[p["hidden"]].meta["val"], whole[p["weight"]].meta["val"]
        kind, item = hidden.device.type, hidden.dtype.itemsize
        n, columns = hint(hidden.shape[0]), hint(weight.shape[1])
        limit = budget or runtime.default_chunk_bytes(kind)
        if "tile" in program:
            columns, limit = min(columns, runtime.tile_columns(kind)), budget or runtime.default_tile_bytes(kind)
        total += min(n * columns * item, max(limit, columns * item))
    return total


def _formula(tensors: list[torch.Tensor], scratch: int) -> str:
    """The sum as sympy prints it, symbols renumbered; sizes that are plain numbers stay factors of their own."""
    sizes = [sympy.Mul(t.dtype.itemsize, *map(_size, t.shape)) for t in tensors]
    return Symbols().text(sympy.expand(sympy.Add(*sizes, scratch)))


def _size(dim: Any) -> Any:
    if isinstance(dim, torch.SymInt):
        return dim.node.expr
    return sympy.Symbol(str(dim), integer=True) if dim > 1 else sympy.Integer(dim)
