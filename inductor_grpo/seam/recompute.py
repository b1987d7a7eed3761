"""What the backward computes again instead of keeping: token terms of the inputs alone.

A partitioner that counts bytes would rather keep a weight of four bytes than read a mask of one and a count of eight
again.  With the terms computed inside of the calls, keeping one costs a kernel of its own.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ..graph import Size, aten, is_tensor, numel, prims, same, shape, target_of, value
from .sums import is_view


def recompute_token_terms(graph: fx.Graph, tokens: list[Size], late: set[fx.Node]) -> None:
    """Marks cheap values of the forward, one a token of a seam, that the backward reads."""
    plain: set[fx.Node] = set()
    written = {node.args[0] for node in graph.nodes if target_of(node) is aten.copy_.default}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node not in written:
                plain.add(node)
        elif node not in late and is_cheap(node) and all(a in plain for a in node.all_input_nodes):
            plain.add(node)
    for node in plain:
        wanted = node.op != "placeholder" and any(user in late for user in node.users)
        if wanted and any(same(numel(shape(node)), size) for size in tokens):
            _mark(node, plain)


def _mark(node: fx.Node, plain: set[fx.Node]) -> None:
    work = [node]
    while work:
        current = work.pop()
        if current.op == "placeholder" or "recompute" in current.meta or current not in plain:
            continue
        current.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        work += current.all_input_nodes


def is_cheap(node: fx.Node) -> bool:
    """Pointwise or a view."""
    if node.op != "call_function" or not is_tensor(node) or isinstance(value(node), torch.SymInt):
        return False
    target = target_of(node)
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return pointwise or is_view(node) or target is prims.convert_element_type.default
