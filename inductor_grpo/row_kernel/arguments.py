"""What a row kernel takes: its inputs, in which order, and where its outputs go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._compat import codegen
from ..seam.kernel_terms import POINTED
from .recognise import Leaf, RowPlan, Unfit


class Tile(NamedTuple):
    """How a row is cut: columns of a tile (a power of two), the warps of a program, tiles read at a time."""

    columns: int
    warps: int
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Store:
    """Where an output goes: ``buffer`` is the logits (by place) that a wide one is written over, None a tensor of its
    own; ``dtype`` is that of the memory."""

    dtype: torch.dtype
    buffer: int | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Dtypes of the inputs by kind, the last stride of each whole tensor, and which of those are numbers on the
    host."""

    logits: tuple[torch.dtype, ...]
    rows: tuple[torch.dtype, ...]
    whole: tuple[torch.dtype, ...]
    strides: tuple[int, ...]
    host: tuple[bool, ...]

    @staticmethod
    def of(specs: Sequence[codegen.TensorSpec], logits: int, rows: int, whole: int, device: torch.device) -> Inputs:
        """From the specs of logits, rows and whole tensors, in this order."""
        dtypes = [spec.dtype for spec in specs]
        last = specs[logits + rows : logits + rows + whole]
        return Inputs(
            tuple(dtypes[:logits]),
            tuple(dtypes[logits : logits + rows]),
            tuple(spec.dtype for spec in last),
            tuple(spec.stride[-1] if spec.stride else 1 for spec in last),
            tuple(spec.device != device for spec in last),
        )


def read(plan: RowPlan) -> list[Leaf]:
    """The inputs that the kernel takes, in the order in which it does."""
    order = ("logits", "rows", "whole", "syms")
    return sorted(plan.leaves.values(), key=lambda leaf: (order.index(leaf.kind), leaf.place))


def filled(plan: RowPlan, stores: Sequence[Store]) -> tuple[int, ...]:
    """The outputs with a vocabulary of columns: the last pass writes them, and whether their rows are live."""

    def fills(i: int) -> bool:
        out, sizes = plan.outputs[i], plan.outputs[i].meta["val"].shape
        return out in plan.wide or stores[i].buffer is not None or (len(sizes) > 0 and sizes[-1] == plan.columns > 1)

    return tuple(i for i in range(len(stores)) if fills(i))


def pointer_of(leaf: Leaf) -> str:
    """The name of an input's parameter."""
    return {"logits": "Z", "rows": "R", "whole": "W", "syms": "n"}[leaf.kind] + str(leaf.place)


def pointed(dtype: torch.dtype) -> str:
    """The type of an element that a pointer shows.  Raises Unfit."""
    if dtype not in POINTED:
        raise Unfit(f"a tensor of {dtype}")
    return POINTED[dtype]
