"""Heads.  Other matmuls end a region and are written by :mod:`inductor_grpo.exits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.fx as fx

from ..graph import aten, node_arg
from ..heads import MATMULS, Head
from ..rowmap import RowMap
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter


@rule(*MATMULS)
class Matmul(Rule):
    """A head becomes a projection of the chunk program; its layout is a seed.  So does any other matmul whose result
    joins the region (the gradient of ``softmax(z) @ embedding`` is one): rows times a whole matrix."""

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        head = e.region.heads.get(node) or self._as_projection(e, node)
        if head is None:
            raise e.region.refuse(node, "NO_ROW_RULE", "a matmul inside of the region multiplies the logits themselves")
        return e.head(head, rowmap)

    @staticmethod
    def _as_projection(e: Emitter, node: fx.Node) -> Head | None:
        if any(e.layouts.is_wide(a) for a in node.all_input_nodes) or node.target is not aten.mm.default:
            return None
        left, right = node_arg(node, 0), node_arg(node, 1)
        if e.layouts[node].vocab == 1:
            return Head(node, left, right, None, 1)
        return Head(node, right, left, None, 0)
