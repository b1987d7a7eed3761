"""Kept logits: what a second program over the same logits does with the first one's.

Where both run in the forward, because what stands between them reads the values of all rows, and the logits of all rows
are one chunk, the first keeps them and the second writes their gradient over them: three matmuls, in the memory of one
chunk.  Between forward and backward logits are only kept as far as ``grpo.keep_bytes`` goes: those of as many leading
rows as fit, and the backward computes the others again.

Both programs project the same rows of the same heads, so one's buffer is the other's: the bits are the same too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from . import row_kernel, runtime
from ._compat import hooks
from .config import Settings
from .depth import TANGENT_DEPTH
from .draft import Draft, RowInput
from .graph import Dim, GraphBuilder, Size, hint, numel, same_sizes, shape, value
from .program import Projection


def plan_kept(
    builder: GraphBuilder, drafts: list[Draft], settings: Settings
) -> dict[int, list[tuple[Draft, int, int]]]:
    """Marks the programs of the forward that keep logits.  For each (by id) the programs that take them over, with the
    place of the projection there and in the taker."""
    takers: dict[int, list[tuple[Draft, int, int]]] = {}
    for draft in drafts:
        # Each program keeps for one other, and none keeps what it was handed itself.
        found = shared_projections(draft, [d for d in drafts if d.kept_rows == 0 and not d.key])
        if found is None or draft.unless is not None or draft.kept_rows != 0:
            continue
        forward, places = found
        rows = all_rows(builder, draft, settings) if draft.depth < TANGENT_DEPTH else 0
        draft.takes_over = rows != 0 and not hooks.recomputes_anything()
        if rows == 0 and settings.keep_bytes:
            rows = kept_rows(builder, draft, list(places), settings)
        if rows != 0:
            forward.kept_rows = draft.kept_rows = rows
            forward.keeps = sorted(set(places.values()))
            takers[id(forward)] = [(draft, place, own) for own, place in places.items()]
    return takers


def shared_projections(later: Draft, drafts: list[Draft]) -> tuple[Draft, dict[int, int]] | None:
    """A program of the forward, before ``later``, that projects everything that it does: for each projection of
    ``later`` (by its place) the place there."""
    if not later.projections or later.group != 1:
        return None
    wanted = projected(later)
    for forward in drafts:
        if forward.depth < min(later.depth, TANGENT_DEPTH) and forward.group == 1:
            known = {key: place for place, key in enumerate(projected(forward))}
            if same_sizes([numel(forward.rows)], [numel(later.rows)]) and all(key in known for key in wanted):
                return forward, {place: known[key] for place, key in enumerate(wanted)}
    return None


def projected(draft: Draft) -> list[tuple[RowInput, fx.Node, fx.Node | None]]:
    """Hidden, weight and bias of each of a program's projections."""
    rows, whole = list(draft.row_inputs), list(draft.whole_inputs)

    def bias(p: Projection) -> fx.Node | None:
        return None if p.bias is None else whole[p.bias]

    return [(rows[p.hidden], whole[p.weight], bias(p)) for p in draft.projections]


def kept_rows(builder: GraphBuilder, draft: Draft, places: list[int], settings: Settings) -> Dim:
    """How many rows of the projections at ``places`` fit into ``keep_bytes``; 0 where none are worth it."""
    most: Any = settings.keep_bytes // max(
        1, sum(_row_bytes(draft, list(draft.projections)[place]) for place in places)
    )
    n = numel(draft.rows)
    if most == 0 or isinstance(n, int):
        return min(most, n) if most else 0
    return builder.dim(torch.sym_min(n, most))


def all_rows(builder: GraphBuilder, draft: Draft, settings: Settings) -> Dim:
    """The number of a program's rows where the logits of all of them are one chunk, and 0 where they are more."""
    whole = list(draft.whole_inputs)
    heads = [(shape(whole[p.weight])[1], shape(whole[p.weight])[0]) for p in draft.projections]
    limit = one_chunk_limit(heads, value(draft.origin).device.type, settings)
    most: Any = limit // max(1, sum(_row_bytes(draft, p) for p in draft.projections))
    n = numel(draft.rows)
    if isinstance(n, int):
        return n if n <= most else 0
    return builder.dim(n * (1 - torch.sym_min(1, n // (most + 1)))) if hint(n) <= most else 0


def one_chunk_limit(heads: Sequence[tuple[Size, Size]], device: str, settings: Settings) -> int:
    """Bytes of logits up to which all rows are one chunk where their gradient is written; ``heads`` are vocabularies
    and hidden sizes."""
    if settings.chunk_bytes:
        return settings.chunk_bytes
    if not row_kernel.wanted(settings.row_kernel, device):
        return runtime.default_chunk_bytes(
            device
        )  # what generated code takes beside the logits is as large as they are
    return runtime.one_chunk_bytes(device, sum(4 * hint(v) * hint(h) for v, h in heads))


def _row_bytes(draft: Draft, projection: Projection) -> int:
    """Bytes of one row of logits."""
    weight, hidden = list(draft.whole_inputs)[projection.weight], list(draft.row_inputs)[projection.hidden].node
    return hint(shape(weight)[1]) * value(hidden).element_size()
