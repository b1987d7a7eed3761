"""Taking a joint graph to the form that the engine reads."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ._compat import fxgraph
from .graph import GraphBuilder, arg, aten, same, same_sizes, shape, target_of


def normalise(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` without no-ops, with equal calls made once, and reads of a part that was just written resolved."""
    copy = fx.Graph(graph.owning_module)
    output = copy.graph_copy(graph, env := {})
    copy.output(output)
    for old, new in env.items():
        new.meta = dict(old.meta)
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    next(n for n in reversed(copy.nodes) if n.op == "output").meta = dict(last.meta)
    fxgraph.remove_noops(copy)
    copy = fxgraph.common_subexpressions(copy)
    _resolve_reads_of_writes(copy)
    copy.eliminate_dead_code()
    return copy


def _resolve_reads_of_writes(graph: fx.Graph) -> None:
    """``slice(slice_scatter(base, src, where), where)`` is ``src``: what functionalisation leaves of in-place edits of views."""
    scatters = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
    for node in list(graph.nodes):
        target = target_of(node)
        if target not in scatters or target_of(node.args[0]) is not scatters[target]:
            continue
        write = node.args[0]
        src = write.args[1]
        if same_sizes(shape(src), shape(node)) and _place(node, 1) == _place(write, 2):
            node.replace_all_uses_with(src)


def _place(node: fx.Node, first: int) -> tuple[Any, ...]:
    rank = len(shape(node.args[0]))
    dim = arg(node, first, "dim", 0) % rank
    if node.target in (aten.select.int, aten.select_scatter.default):
        return dim, str(arg(node, first + 1, "index"))
    size = shape(node.args[0])[dim]
    start = GraphBuilder.size_of(arg(node, first + 1, "start") or 0)
    if isinstance(start, int) and start < 0:
        start = start + size
    return dim, "0" if same(start, 0) else str(start), str(arg(node, first + 3, "step", 1))
