"""Tables of ``bucketize`` and ``searchsorted`` that are part of another tensor, such as ``cu_seqlens[1:]``.

Inductor of torch 2.11 looks up in the memory of the tensor that the table was cut out of, from its start: the ids are
those of ``cu_seqlens``.  A table in memory of its own is read right.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch._inductor import lowering

from . import fxgraph

aten = torch.ops.aten
_TABLES = {aten.bucketize.Tensor: 1, aten.bucketize.Scalar: 1, aten.searchsorted.Tensor: 0, aten.searchsorted.Scalar: 0}


def reads_from_the_start() -> bool:
    """Whether this torch forgets where a table begins."""
    return not hasattr(lowering, "_realize_bucketize_lookup_tensor")


def own_tables(graph: fx.Graph) -> None:
    """Gives each table on a GPU that is a view memory of its own, where that is needed."""
    if not reads_from_the_start():
        return
    for node in list(graph.nodes):
        place = _TABLES.get(node.target) if node.op == "call_function" else None
        table = node.args[place] if place is not None else None
        if not isinstance(table, fx.Node) or not getattr(table.target, "is_view", False):
            continue
        if table.meta["val"].device.type == "cpu":  # looked up by torch's own kernel
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(aten.maximum.default, (table, table))  # a clone would be taken for a no-op
        with fxgraph.fake_mode_of(graph):
            copy.meta["val"] = aten.maximum.default(table.meta["val"], table.meta["val"])
        node.update_arg(place, copy)
