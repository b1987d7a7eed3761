"""One rule per aten operation: is it local to a row, and what is it in a chunk program?

A rule has two parts.  ``infer`` spreads layouts from a node's operands to the node and back; ``emit`` writes the node
into a chunk program.  The engine knows nothing else about an operation: no rule knows what a log-softmax is.
"""

from __future__ import annotations

import torch.fx as fx

from ..graph import target_of
from ..layout import Layouts
from . import indexing, matmul, pointwise, reductions, selection, views  # noqa: F401  (each registers its rules)
from .base import RULES, Rule
from .pointwise import POINTWISE, is_pointwise

__all__ = ["RULES", "Rule", "infer_layouts", "rule_of"]


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a node's operation; None when there is none."""
    target = target_of(node)
    if target in RULES:
        return RULES[target]
    return POINTWISE if is_pointwise(target) else None


def infer_layouts(layouts: Layouts) -> None:
    """Spreads layouts from the seeds until nothing changes."""
    while nodes := layouts.drain():
        for node in nodes:
            rule = rule_of(node)
            if rule is not None and node not in layouts.conflicts:
                rule.infer(layouts, node)
