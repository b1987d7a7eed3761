"""The custom operators: ``inductor_grpo::rows``, ``rows_unless`` and ``tiles``, which run programs, and small ones.

Those are opaque to Inductor's scheduler and run one program over the rows of a region, or over tiles of its vocabulary.
Everything they need is in their arguments, so a graph that holds them can be cached and loaded by a process that never
ran the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inductor_grpo import by_use, runtime
from inductor_grpo import tiles as tile_loop
from inductor_grpo.program import Program, TileProgram

NAMESPACE = "inductor_grpo"
_ARGUMENTS = (
    "(Tensor[] rows, Tensor[] whole, SymInt n, SymInt[] syms, str program, int chunk_bytes, str codegen) -> Tensor[]"
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
    codegen      how the body runs: "inductor" or "eager"; with "+row_kernel" behind it one Triton program a row where
                 the body is fit for that (:mod:`inductor_grpo.row_kernel`), and as said otherwise

    Returns one fresh contiguous tensor per sink, one ``[kept_rows, V]`` per projection that the program keeps, and the
    flag of a program with a key (:func:`inductor_grpo.by_use.forward`).
    Raises ValueError for another ``codegen`` or a negative ``chunk_bytes``.
    """
    _check(chunk_bytes, codegen.removesuffix("+row_kernel"))
    run = by_use.forward if Program.from_text(program).key else runtime.run
    return run(rows, whole, n, syms, program, chunk_bytes, codegen)


def _rows_unless(
    ready: Sequence[Tensor],
    flag: Tensor,
    factor: Tensor,
    others: Sequence[Tensor],
    key: str,
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    n: int,
    syms: Sequence[int],
    program: str,
    chunk_bytes: int,
    codegen: str,
) -> list[Tensor]:
    """As ``rows``, unless the results are ``ready`` times ``factor`` (:func:`inductor_grpo.by_use.backward`)."""
    _check(chunk_bytes, codegen.removesuffix("+row_kernel"))
    return by_use.backward(ready, flag, factor, others, key, rows, whole, n, syms, program, chunk_bytes, codegen)


def _tiles(
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    n: int,
    syms: Sequence[int],
    program: str,
    chunk_bytes: int,
    codegen: str,
) -> list[Tensor]:
    """Runs a tile program (:class:`inductor_grpo.program.TileProgram`); arguments and results as those of ``rows``.

    Raises RuntimeError for a label outside of the vocabulary (on CUDA: an assertion of the device)."""
    _check(chunk_bytes, codegen)
    return tile_loop.run(rows, whole, n, syms, program, chunk_bytes, codegen)


def _check(chunk_bytes: int, codegen: str) -> None:
    if codegen not in ("inductor", "eager"):
        raise ValueError(f"codegen must be 'inductor' or 'eager', not {codegen!r}")
    if chunk_bytes < 0:
        raise ValueError(f"chunk_bytes must be 0 (default) or positive, not {chunk_bytes}")


def _fake(read: Callable[[str], Program | TileProgram]) -> Callable[..., list[Tensor]]:
    def fake(
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        n: int,
        syms: Sequence[int],
        program: str,
        chunk_bytes: int,
        codegen: str,
    ) -> list[Tensor]:
        """Shapes and dtypes alone, from the sinks; sizes are never compared, so no guard comes from here."""
        some, known = next(iter((*rows, *whole))), read(program)
        found: list[tuple[tuple[int, ...], torch.dtype]] = [
            (runtime.shape(s, rows, whole, n, syms), runtime.dtype(s.dtype)) for s in known.sinks
        ]
        if isinstance(known, Program):
            found += runtime.kept_shapes(known, rows, whole, syms)
            found += [((1,), torch.int8)] if known.key else []
        return [torch.empty(dims, dtype=dtype, device=some.device) for dims, dtype in found]

    return fake


for _name, _kernel, _read in (("rows", _rows, Program.from_text), ("tiles", _tiles, TileProgram.from_text)):
    _library.define(_name + _ARGUMENTS, tags=_TAGS)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake(_read), lib=_library)


_library.define(
    "rows_unless(Tensor[] ready, Tensor flag, Tensor factor, Tensor[] others, str key, " + _ARGUMENTS.removeprefix("("),
    tags=_TAGS,
)
_library.impl("rows_unless", _rows_unless, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::rows_unless",
    lambda ready, flag, factor, others, key, *program: [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in ready
    ],
    lib=_library,
)


def _unless(ready: Tensor, factor: Tensor, others: Sequence[Tensor], complete: Tensor) -> Tensor:
    """``ready * factor`` where all of ``others`` are zero, and ``complete`` elsewhere.

    Holds the place of ``rows_unless`` until the programs are known (:mod:`inductor_grpo.observed`)."""
    zero = torch.stack([other.eq(0).all() for other in others]).all()
    return torch.where(zero, ready * factor, complete).to(complete.dtype)


_library.define("unless(Tensor ready, Tensor factor, Tensor[] others, Tensor complete) -> Tensor", tags=_TAGS)
_library.impl("unless", _unless, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::unless", lambda ready, factor, others, complete: torch.empty_like(complete), lib=_library
)


def _tangent(tangent: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """A copy of the 0-dim ``tangent``; ``kept`` are tensors that the gradients depend on.

    A region that ran in one pass has its gradients when the backward starts.  That they are functions of ``kept`` must
    stay visible: autograd would take a second derivative of them to be zero."""
    return tangent.clone()


_library.define("tangent(Tensor tangent, Tensor[] kept) -> Tensor", tags=_TAGS)
_library.impl("tangent", _tangent, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::tangent", lambda tangent, kept: torch.empty_like(tangent), lib=_library)


def _after(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy of ``value`` that is there when ``others`` are.

    The gradients of a region that needs all rows first belong to the forward, where its logits are: as a part of what
    an output of the forward is computed from, torch's partitioner leaves them there."""
    return value.clone()


_library.define("after(Tensor value, Tensor[] others) -> Tensor", tags=_TAGS)
_library.impl("after", _after, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::after", lambda value, others: torch.empty_like(value), lib=_library)

rows = torch.ops.inductor_grpo.rows.default
rows_unless = torch.ops.inductor_grpo.rows_unless.default
tiles = torch.ops.inductor_grpo.tiles.default
unless = torch.ops.inductor_grpo.unless.default
OPERATORS = (rows, rows_unless, tiles)
"""Those that run programs over hidden states."""
