"""Heads.  Other matmuls end a region and are written by :mod:`inductor_grpo.exits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.fx as fx

from ..heads import MATMULS
from ..rowmap import RowMap
from .base import Rule, rule

if TYPE_CHECKING:
    from ..emit import Emitter


@rule(*MATMULS)
class Matmul(Rule):
    """A head becomes a projection of the chunk program; its layout is a seed."""

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        head = e.region.heads.get(node)
        if head is None:
            raise e.region.refuse(node, "NO_ROW_RULE", "a matmul inside of the region is not its head")
        return e.head(head, rowmap)
