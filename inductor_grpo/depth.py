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

from ._compat.collectives import is_collective
from .graph import inputs_through_tuples
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
