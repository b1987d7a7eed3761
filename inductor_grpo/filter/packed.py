"""The live columns of a chunk's gradient as one matrix, and the two products with it, on a device that has kernels.

The chunk is one part here.  A column that is kept costs its part, beside the products, a row of the weight to read and
one of its gradient to add to: on an H200 with bf16 about as much as 1000 rows of the products.  The columns that are
live for any of n rows grow slowly with n, as n**0.3 for the frequencies of a language (4% of 151936 for 1024 rows, 8%
for 8192).  Parts of 1024 rows are then no faster than all rows together, and their sums of the weight's gradient would
be rounded once a part where all rows are one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inductor_grpo.filter import launch

if TYPE_CHECKING:
    from inductor_grpo.runtime import Sum

# What the number of packed columns is a multiple of, with columns of zeros: whole tiles of a matmul.
STEP = 64


class Packed:
    """The live ``columns`` ``[k]`` of a gradient, a block of ``block`` at a time; ``sums`` ``[n]`` are those of its
    rows over all columns."""

    def __init__(self, columns: Tensor, sums: Tensor, block: int) -> None:
        self._columns = columns
        self._left_out = sums
        self._block = block
        self._value: Tensor | None = None

    def pack(self, value: Tensor, owned: bool) -> Tensor:
        """Moves them together, once; with ``owned`` that destroys ``value``."""
        if self._value is None:
            width = min(-(-self._columns.shape[0] // STEP) * STEP, value.shape[1])
            self._value = launch.pack(value, self._columns, width, self._left_out, owned)
        return self._value

    def _blocks(self, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self._columns.shape[0], self._block):
            stop = start + self._block
            yield packed[:, start:stop], self._columns[start:stop]

    def contract(self, value: Tensor, weight: Tensor, out: Tensor, sum_of_weight: Tensor) -> None:
        """``out = value @ weight``, with one mean row of ``weight`` for all columns that are left out."""
        from inductor_grpo.runtime import Sum, add_product

        packed = self.pack(value, owned=False)
        total = Sum(torch.empty(out.shape, dtype=sum_of_weight.dtype, device=out.device))
        others = sum_of_weight.clone()
        for some, columns in self._blocks(packed):
            of_weight = launch.gather(weight, columns, some.shape[1])
            add_product(total, some, of_weight)
            others -= of_weight.sum(0, dtype=others.dtype)
        if total.empty:
            total.tensor.zero_()
        mean = others / (value.shape[1] - self._columns.shape[0])
        total.tensor.addr_(self._left_out.to(mean.dtype), mean)
        out.copy_(total.tensor)

    def outer(self, total: Sum, value: Tensor, other: Tensor, transposed: bool) -> None:
        """Adds ``value.T @ other`` (its transpose) to a running sum."""
        from inductor_grpo.runtime import Sum, add_product

        packed = self.pack(value, owned=False)
        first, total.empty = total.empty, False
        if first:
            total.tensor.zero_()
        of_columns = total.tensor.t() if transposed else total.tensor
        for some, columns in self._blocks(packed):
            if first:
                block = total.tensor.new_empty((other.shape[1], some.shape[1])[:: 1 if transposed else -1])
            else:
                block = launch.gather(of_columns, columns, some.shape[1])
                block = block.t() if transposed else block
            left, right = (other.t(), some) if transposed else (some.t(), other)
            add_product(Sum(block, empty=first), left, right)
            launch.scatter(block.t() if transposed else block, columns, of_columns)
