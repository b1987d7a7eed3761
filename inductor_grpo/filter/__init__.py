"""The opt-in filter of gradients: columns of dlogits that are next to nothing take no part in dX and dW.

    kernels     which columns are live, and moving them, in Triton
    launch      launches them, with torch in their place where one does not compile
    packed      the products of a chunk whose columns kernels have found

With ``grpo.filter_eps`` = e a column of a part's rows is left out when each of its elements is smaller than e times
the largest magnitude in that element's own row: ``|d[r, j]| < e * max_k |d[r, k]|``.

**What that costs.**  Small elements are many, and of one sign, so what they add up to is not lost: in the gradient of a
row's hidden state the columns D that are left out count with the mean m of their rows of W.  That gradient changes by
less than ``e * max_k |d[r, k]| * sum_D |W[j] - m|``, and that of ``W[j]`` by less than
``e * sum_r max_k |d[r, k]| * |x[r]|`` over the rows r for which j was left out.  With e = 2**-12 an element of D is
smaller than an eighth of what rounding to bfloat16 does to the largest one of its row.  The gradient of a bias is not
filtered, nor are regions that run over vocabulary tiles.  Rows without a gradient keep no column, a nan or an infinity
in dlogits keeps its own; what is not finite in hidden spreads through the columns that are kept alone.

**What it saves.**  A trained model's probabilities are peaked, and its vocabulary has frequent and rare words: most
columns are next to nothing in all rows of a part.  Those that are left are gathered, multiplied, and added where they
belong, a block at a time so that the copies stay small.  Single columns rather than wider tiles: of random columns a
seventh may be live where nearly every run of sixteen has a live one.  Which they are is known on the device only, so
each chunk waits for it once.

A part is :data:`ROWS` rows, or all rows of the chunk where kernels find the columns (:mod:`.packed` says why).  Those
take two readings of the gradient, the second of them for the most part from the cache, and a third for what is kept,
which moves together where it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from inductor_grpo._compat import codegen
from inductor_grpo.filter import launch
from inductor_grpo.filter.packed import Packed

if TYPE_CHECKING:
    from inductor_grpo.runtime import Sum

ROWS = {"cpu": 256, "cuda": 1024}
"""Rows of a part that torch looks at, by device."""
# Columns that are gathered at a time.
BLOCK = 16384
# Above this share of live columns the copies cost more than the matmuls save.
MOST_LIVE = 0.5


class Part(NamedTuple):
    """Rows ``start`` to ``stop`` of a gradient and their live columns, ascending; None: all columns.

    ``packed`` where kernels have found them, in all rows of the gradient."""

    start: int
    stop: int
    columns: Tensor | None
    packed: Packed | None = None


def live_parts(value: Tensor, eps: float) -> list[Part] | None:
    """The parts of a gradient ``[n, V]``; None where nothing is to be left out."""
    n, width = value.shape
    if not eps or not n or not width or codegen.capturing():
        return None
    most = int(MOST_LIVE * width)
    found = launch.find(value, eps, most) if launch.on_device(value.device) else None
    if found is not None:
        live, sums = found
        if live.shape[0] > most:
            return None
        return [Part(0, n, live, Packed(live, sums, BLOCK))]
    step = ROWS.get(value.device.type, ROWS["cuda"])
    starts = range(0, n, step)
    kept = torch.stack([live_columns(value[start : start + step], eps) for start in starts]).cpu()
    parts = []
    for start, flags in zip(starts, kept):
        columns: Tensor | None = None
        if flags.sum().item() <= most:
            columns = flags.nonzero().squeeze(1).to(value.device)
        parts.append(Part(start, min(start + step, n), columns))
    return parts if any(part.columns is not None for part in parts) else None


def live_columns(value: Tensor, eps: float) -> Tensor:
    """``[V]``: whether a column of these rows is kept."""
    kind = torch.promote_types(torch.float32, value.dtype)
    largest = torch.linalg.vector_norm(value, torch.inf, dim=1, keepdim=True, dtype=kind)
    least, has_gradient = largest * eps, largest != 0
    found = []
    for columns in value.split(BLOCK, 1):
        # Not smaller, rather than at least as large: true for a nan.
        kept = (columns.abs() < least).logical_not_().logical_and_(has_gradient)
        found.append(kept.any(0))
    return torch.cat(found)


def pack(parts: list[Part], value: Tensor, owned: bool) -> None:
    """Moves the live columns together where kernels have found them; with ``owned`` in the memory of ``value``, which
    is read by nothing but :func:`contract` and :func:`outer` then."""
    for part in parts:
        if part.packed is not None:
            part.packed.pack(value, owned)


def contract(parts: list[Part], value: Tensor, weight: Tensor, out: Tensor, sums: dict[int, Tensor]) -> None:
    """``out = value @ weight`` with the parts' columns, and one mean row of ``weight`` for all others.

    ``sums`` keeps the sum of the weight's rows from one chunk to the next."""
    from inductor_grpo.runtime import Sum, add_product

    kind = torch.promote_types(torch.float32, out.dtype)
    for start, stop, columns, packed in parts:
        rows, result = value[start:stop], out[start:stop]
        if columns is None:
            result.copy_(torch.mm(rows, weight))
            continue
        if id(weight) not in sums:
            sums[id(weight)] = weight.sum(0, dtype=kind)
        if packed is not None:
            packed.contract(rows, weight, result, sums[id(weight)])
            continue
        total = Sum(torch.zeros(result.shape, dtype=kind, device=result.device), empty=False)
        others, left_out = sums[id(weight)].clone(), rows.sum(1, dtype=kind)
        for some in columns.split(BLOCK):
            kept, of_weight = rows.index_select(1, some), weight.index_select(0, some)
            add_product(total, kept, of_weight)
            others -= of_weight.sum(0, dtype=kind)
            left_out -= kept.sum(1, dtype=kind)
        total.tensor.addr_(left_out, others / (value.shape[1] - columns.numel()))
        result.copy_(total.tensor)


def outer(parts: list[Part], total: Sum, value: Tensor, other: Tensor, transposed: bool) -> None:
    """Adds ``value.T @ other`` (its transpose) to a running sum with the parts' columns alone."""
    from inductor_grpo.runtime import Sum, add_product

    sum_of_columns = total.tensor.t() if transposed else total.tensor
    for start, stop, columns, packed in parts:
        rows, operand = value[start:stop], other[start:stop]
        if packed is not None:
            packed.outer(total, rows, operand, transposed)
            continue
        if total.empty:
            total.tensor.zero_()
            total.empty = False
        if columns is None:
            add_product(Sum(sum_of_columns, empty=False), rows.t(), operand)
            continue
        for some in columns.split(BLOCK):
            block = Sum(sum_of_columns.index_select(0, some), empty=False)
            add_product(block, rows.index_select(1, some).t(), operand)
            sum_of_columns.index_copy_(0, some, block.tensor)
