"""Collectives as they stand in a graph: operators of torch's functional collectives."""

from __future__ import annotations

import torch
import torch.fx as fx

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")


def is_functional(node: fx.Node) -> bool:
    """A collective, or the wait for its result: a function of its inputs, though torch counts waits as impure."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES


def is_wait(node: fx.Node) -> bool:
    """The wait for a collective's result."""
    return is_functional(node) and "wait_tensor" in str(node.target)


def is_collective(node: fx.Node) -> bool:
    """Every rank of a group has to make this call, in the same order among the others."""
    return is_functional(node) and not is_wait(node)
