"""The custom operator ``inductor_grpo::rows``.

It is opaque to Inductor's scheduler and runs one chunk program over the rows of a region.  Everything it needs is in
its arguments, so a graph that holds it can be cached and loaded by a process that never ran the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_grpo import runtime
from inductor_grpo.program import Program

NAMESPACE = "inductor_grpo"
_SCHEMA = (
    "rows(Tensor[] rows, Tensor[] whole, SymInt n, SymInt[] syms, "
    "str program, int chunk_bytes, str codegen) -> Tensor[]"
)
# Any strides are taken as they come: Inductor must not copy a transposed weight or a padded hidden state for us.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "flexible_layout") if hasattr(torch.Tag, name))

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _rows(
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    n: int,
    syms: Sequence[int],
    program: str,
    chunk_bytes: int,
    codegen: str,
) -> list[Tensor]:
    """Runs ``program`` (see :mod:`inductor_grpo.program`) over chunks of rows.

    rows         tensors ``[n, c]``, cut into runs of rows
    whole        tensors that every run sees: weights ``[H, V]``, ``[1, c]``, 0-dim
    n            number of rows, may be 0
    syms         integers that the program names ``syms[i]`` or ``"s<i>"``
    chunk_bytes  upper bound for one ``[rows, V]`` buffer; 0 takes the device's default
    codegen      how the body runs: "inductor" or "eager"

    Returns one fresh contiguous tensor per sink.
    Raises ValueError for another ``codegen`` or a negative ``chunk_bytes``.
    """
    if codegen not in ("inductor", "eager"):
        raise ValueError(f"codegen must be 'inductor' or 'eager', not {codegen!r}")
    if chunk_bytes < 0:
        raise ValueError(f"chunk_bytes must be 0 (default) or positive, not {chunk_bytes}")
    return runtime.run(rows, whole, n, syms, program, chunk_bytes, codegen)


def _rows_fake(
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    n: int,
    syms: Sequence[int],
    program: str,
    chunk_bytes: int,
    codegen: str,
) -> list[Tensor]:
    """Shapes and dtypes alone, from the sinks; sizes are never compared, so no guard comes from here."""
    some = next(iter((*rows, *whole)))
    return [
        torch.empty(runtime.shape(s, rows, whole, n, syms), dtype=runtime.dtype(s.dtype), device=some.device)
        for s in Program.from_text(program).sinks
    ]


_library.define(_SCHEMA, tags=_TAGS)
_library.impl("rows", _rows, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::rows", _rows_fake, lib=_library)

rows = torch.ops.inductor_grpo.rows.default
