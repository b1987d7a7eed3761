"""Near misses: the pattern that a program comes closest to, and the first operation that differs.

A pattern is an acceleration; where none fits, the engine streams the region all the same.  Spellings are laid over the
body of a chunk program from each of its nodes towards the inputs, and the one of which most operations agree is told.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from inductor_grpo.canonical import target_text
from inductor_grpo.capture import Body, CompiledGraph
from inductor_grpo.pattern import Pattern, all_patterns, trace
from inductor_grpo.report import Location

_SEEN_THROUGH = (torch.ops.aten.expand.default,)


@dataclasses.dataclass(frozen=True)
class Near:
    """``agree`` of ``total`` operations are the pattern's; ``expected`` and ``found`` at the first that is not (both
    empty when all agree)."""

    pattern: str
    agree: int
    total: int
    expected: str
    found: str
    location: Location | None
    hints: tuple[str, ...]

    def __str__(self) -> str:
        if self.agree == self.total:
            return f"all operations of {self.pattern} are there"
        return (
            f"closest to {self.pattern}: {self.agree} of {self.total} operations agree;"
            f" expected {self.expected}, found {self.found}"
        )


def near_misses(graph: CompiledGraph) -> list[Near]:
    """The near misses of a compilation: of each program of row values that no pattern took part in, the closest one.

    A program that gives gradients too, or keeps logits, has the logits of its rows anyway: no use for a pattern."""
    found = [closest(body) for body in graph.bodies if not body.patterns and not body.needs_logits]
    return list(dict.fromkeys(n for n in found if n is not None))


def closest(body: Body) -> Near | None:
    """The pattern that a body comes closest to; None when less than half of any agrees."""
    best: Near | None = None
    for pattern in all_patterns().values():
        for spelling in pattern.spellings:
            found = _best_of(trace(spelling.value).graph, body, pattern)
            if found is not None and (best is None or _rank(found) > _rank(best)):
                best = found
    return best if best is not None and 2 * best.agree >= best.total else None


def _rank(near: Near) -> tuple[float, int]:
    return near.agree / near.total, near.agree


def _best_of(spelling: fx.Graph, body: Body, pattern: Pattern) -> Near | None:
    output = next(n for n in reversed(spelling.nodes) if n.op == "output")
    root: Any = output.args[0]
    total = len(_operations(spelling))
    best: _Overlay | None = None
    for node in body.graph.nodes:
        if node.op != "call_function":
            continue
        overlay = _Overlay()
        overlay.lay(root, node)
        if best is None or len(overlay.agree) > len(best.agree):
            best = overlay
    if best is None or not best.agree:
        return None
    expected, node = best.differs or ("", None)
    found = target_text(node) if isinstance(node, fx.Node) else str(node or "")
    at = best.place
    return Near(pattern.name, len(best.agree), total, expected, found, at, pattern.hints)


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


class _Overlay:
    """One way to lay a spelling over a body."""

    def __init__(self) -> None:
        self.agree: set[fx.Node] = set()
        self.differs: tuple[str, Any] | None = None
        self.place: Location | None = None
        self._bound: dict[fx.Node, fx.Node] = {}

    def lay(self, pattern: fx.Node, node: fx.Node) -> None:
        """Lays ``pattern`` and what it is computed from over ``node``."""
        node = _through(node)
        if pattern in self._bound:
            if self._bound[pattern] is not node:
                self._differ("the same value again", node, node)
            return
        self._bound[pattern] = node
        if pattern.op == "placeholder":
            return
        if pattern.target is not node.target:
            self._differ(target_text(pattern), node, node)
        elif not self._same_numbers(pattern, node):
            self._differ(f"{target_text(pattern)}{_numbers(pattern)}", f"{target_text(node)}{_numbers(node)}", node)
        else:
            self.agree.add(pattern)
        for ours, theirs in zip(pattern.all_input_nodes, node.all_input_nodes):
            self.lay(ours, theirs)

    def _differ(self, expected: str, found: Any, node: fx.Node) -> None:
        if self.differs is None:
            self.differs, self.place = (expected, found), _location(node)

    @staticmethod
    def _same_numbers(pattern: fx.Node, node: fx.Node) -> bool:
        return _numbers(pattern) == _numbers(node) and len(pattern.all_input_nodes) == len(node.all_input_nodes)


def _numbers(node: fx.Node) -> list[Any]:
    return [a for a in node.args if not isinstance(a, fx.Node)]


def _through(node: fx.Node) -> fx.Node:
    while node.target in _SEEN_THROUGH and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _location(node: fx.Node) -> Location | None:
    """The node's own line, or that of what it is computed from or of what reads it."""
    work, seen = [node], {node}
    while work:
        node = work.pop(0)
        found = Location.of(node)
        if found is not None:
            return found
        more = [n for n in (*node.users, *node.all_input_nodes) if n not in seen]
        seen.update(more)
        work += more
    return None
