"""Kept logits: what the two-pass schedule does with memory that it is given.

``grpo.keep_bytes`` lets the forward keep the logits of as many leading rows as fit; the backward computes the others
again.  The forward's and the backward's program project the same rows of the same heads, so one's buffer is the
other's: the bits are the same too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from .config import Settings
from .depth import TANGENT_DEPTH
from .draft import Draft, RowInput
from .graph import Dim, GraphBuilder, hint, numel, same_sizes, shape, value
from .program import Projection


def plan_kept(
    builder: GraphBuilder, drafts: list[Draft], settings: Settings
) -> dict[int, list[tuple[Draft, int, int]]]:
    """Marks the programs of the forward that keep logits.  For each (by id) the programs that take them over, with the
    place of the projection there and in the taker."""
    takers: dict[int, list[tuple[Draft, int, int]]] = {}
    for draft in drafts if settings.keep_bytes else []:
        found = shared_projections(draft, [d for d in drafts if not d.keeps])
        if found is None:
            continue
        forward, places = found
        forward.kept_rows = draft.kept_rows = kept_rows(builder, draft, list(places), settings)
        if forward.kept_rows != 0:
            forward.keeps = sorted(set(places.values()))
            takers[id(forward)] = [(draft, place, own) for own, place in places.items()]
    return takers


def shared_projections(backward: Draft, forwards: list[Draft]) -> tuple[Draft, dict[int, int]] | None:
    """A program of the forward that projects everything that ``backward`` does: for each projection of ``backward``
    (by its place) the place there."""
    if backward.depth < TANGENT_DEPTH or not backward.projections or backward.group != 1:
        return None
    wanted = projected(backward)
    for forward in forwards:
        if forward.depth < TANGENT_DEPTH and forward.group == 1:
            known = {key: place for place, key in enumerate(projected(forward))}
            if same_sizes([numel(forward.rows)], [numel(backward.rows)]) and all(key in known for key in wanted):
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
    rows, whole, projections = list(draft.row_inputs), list(draft.whole_inputs), list(draft.projections)
    row_bytes = 0
    for place in places:
        p = projections[place]
        row_bytes += hint(shape(whole[p.weight])[1]) * value(rows[p.hidden].node).element_size()
    most: Any = settings.keep_bytes // max(1, row_bytes)
    n = numel(draft.rows)
    if most == 0 or isinstance(n, int):
        return min(most, n) if most else 0
    return builder.dim(torch.sym_min(n, most))
