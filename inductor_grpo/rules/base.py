"""The registry of row rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.fx as fx

from ..layout import Layouts
from ..rowmap import RowMap

if TYPE_CHECKING:
    from ..emit import Emitter


class Rule:
    """How one operation treats rows; subclasses are stateless."""

    def infer(self, layouts: Layouts, node: fx.Node) -> None:
        """Sets the layouts that follow from those of the operands, and of the node for its operands."""

    def is_local(self, layouts: Layouts, node: fx.Node) -> bool:
        """Each row of the result depends on the same row of the operands alone.  Asked before ``emit``: a node may have
        its layout from its uses, whatever it does itself."""
        return True

    def emit(self, e: Emitter, node: fx.Node, rowmap: RowMap) -> fx.Node:
        """The node's value in a chunk program, in canonical form."""
        raise e.unknown(node)


RULES: dict[Any, Rule] = {}
_R = TypeVar("_R", bound=type[Rule])


def rule(*targets: Any) -> Callable[[_R], _R]:
    """Registers a rule class for some operations."""

    def register(cls: _R) -> _R:
        RULES.update(dict.fromkeys(targets, cls()))
        return cls

    return register
