"""Nodes of a graph as calls of a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ..graph import value
from .program import Call

DROPPED = ("layout", "pin_memory", "memory_format", "non_blocking", "device")
"""Arguments that say nothing about a value."""


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
