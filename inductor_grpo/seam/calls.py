"""Nodes of a graph as calls of a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ..graph import args_of, aten, value
from .program import Call

DROPPED = ("layout", "pin_memory", "memory_format", "non_blocking", "device")
"""Arguments that say nothing about a value."""


CONSTANTS = (aten.full.default, aten.scalar_tensor.default)
"""Tensors of one number, which a call writes as that number."""


class Calls(list[Call]):
    """The calls of a program in the order in which they are written, named by ``prefix`` and their place."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def add(self, target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], dtype: torch.dtype) -> str:
        """Writes one call; its name."""
        call = Call(f"{self.prefix}{len(self)}", target, args, kwargs, str(dtype).removeprefix("torch."))
        self.append(call)
        return call.name

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """Writes the value of this name in another dtype; its name there."""
        return self.add("prims.convert_element_type.default", ("%" + name, str(dtype)), (), dtype)

    def constant(self, node: fx.Node) -> str:
        """Writes the number of one of :data:`CONSTANTS`; its name."""
        return self.add("aten.scalar_tensor.default", (literal(args_of(node)[-1]),), (), value(node).dtype)


def literal(value: float) -> float | str:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


def call_of(node: fx.Node, name: str, named: Callable[[fx.Node], str]) -> Call:
    """``node`` as a call with the result ``name``; ``named`` gives the text of an operand, such as "%v3"."""

    def written(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return named(a)
        if isinstance(a, torch.dtype):
            return str(a)
        return literal(a) if isinstance(a, float) else a

    kwargs = tuple((k, written(v)) for k, v in node.kwargs.items() if k not in DROPPED and v is not None)
    dtype = str(value(node).dtype).removeprefix("torch.")
    return Call(name, str(node.target), tuple(map(written, node.args)), kwargs, dtype)
