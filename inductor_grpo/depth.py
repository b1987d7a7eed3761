"""Depths: when a region's values can be computed.

A program reads row inputs and may need results of another program first (the mean of all log-probs, a tangent).  The
depth of a node counts how often what leads to it left a region and came back; programs are split by depth, so no
program can depend on itself.  Tangents start far deeper than any forward value: that is the two-pass schedule, in which
the backward recomputes the logits of a chunk instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx as fx

from ._compat import fxgraph
from ._compat.collectives import is_collective, is_functional
from .graph import ancestors, inputs_through_tuples
from .layout import Layouts

TANGENT_DEPTH = 1000


def is_tangent(node: fx.Node) -> bool:
    """A gradient that AOTAutograd feeds into the joint graph."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def after_tangent(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def node_depths(graph: fx.Graph, layouts: Layouts, floors: Mapping[fx.Node, int] | None = None) -> dict[fx.Node, int]:
    """The depth of every node, and of those in ``floors`` no less than given there.

    A collective is no earlier than the one before it: they keep their order."""
    floors = floors or {}
    depths: dict[fx.Node, int] = {}
    collectives = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            depths[node] = TANGENT_DEPTH if is_tangent(node) else 0
            continue
        own = layouts.space_of(node)
        several = not isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        depth = floors.get(node, 0)
        for a in inputs_through_tuples(node):
            space = layouts.space_of(a)
            inside = space is None or several or (own is not None and (layouts.is_wide(a) or space == own))
            depth = max(depth, depths[a] + (0 if inside else 1))
        if is_collective(node):
            depth = collectives = max(depth, collectives)
        depths[node] = depth
    return depths


def effects(graph: fx.Graph) -> list[fx.Node]:
    """The calls that do something besides returning a value: writes to inputs and buffers, assertions.  Random numbers
    that nobody reads are none."""
    return [n for n in graph.nodes if n.op == "call_function" and n.is_impure() and not _is_random(n)]


def live(graph: fx.Graph) -> set[fx.Node]:
    """What the output or an effect needs, in a graph that may not be sorted."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return ancestors([output, *effects(graph)])


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def forward_first(graph: fx.Graph) -> None:
    """Puts the forward of a sorted graph with collectives before its backward, writes to inputs last, each as it was.

    Torch's partitioner copies what stands behind the first node of the backward and looks impure to it: a wait of the
    forward there, with its collective and the logits that it came from, would run again in the backward."""
    if not any(map(is_functional, graph.nodes)):
        return
    late = after_tangent(graph)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    calls = [n for n in graph.nodes if n.op == "call_function"]
    writes = {n for n in effects(graph) if not is_functional(n)}
    for node in [*(n for n in calls if n in late and n not in writes), *(n for n in calls if n in writes)]:
        output.prepend(node)
    fxgraph.sort_topologically(graph)
