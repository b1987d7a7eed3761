"""Whether a region is worth streaming, and how it runs."""

from __future__ import annotations

import torch
import torch.fx as fx

from . import keep, runtime
from ._compat import fxgraph
from .components import Component
from .config import Settings
from .depth import TANGENT_DEPTH
from .draft import Draft
from .exits import Exit
from .graph import GraphBuilder, Size, hint, is_tensor, nbytes, numel, shape, value
from .heads import Head
from .program import Program, TileProgram
from .report import Rejection, Rewrite, human
from .tiling import as_tiles


def reason_to_leave(component: Component, settings: Settings, rewrites: int) -> Rejection | None:
    """Why a region that could be streamed is left alone; None when it is not."""
    size, limit = component.logits_bytes, _limit(settings, value(component.heads[0].node).device)
    if "engine" in settings.disable:
        return Rejection("DISABLED", "grpo.disable names the engine", component.location, size)
    if settings.max_rewrites is not None and rewrites >= settings.max_rewrites:
        message = f"grpo.max_rewrites allows {settings.max_rewrites} rewrites in one graph"
        return Rejection("DISABLED", message, component.location, size)
    if size < limit:
        fxgraph.hold_below([value(head.node) for head in component.heads], limit)
        message = (
            f"logits of {human(size)} are below grpo.min_logits_bytes ({human(limit)}); lower that setting (0 rewrites"
            " every head)"
        )
        return Rejection("TOO_SMALL", message, component.location, size)
    return None


def _limit(settings: Settings, device: torch.device) -> int:
    limit = settings.min_logits_bytes
    return runtime.min_logits_bytes(device.type) if limit is None else limit


def least_bytes(graph: fx.Graph, settings: Settings) -> int:
    """Bytes of logits that matter in a graph."""
    tensors = [value(n) for n in graph.nodes if is_tensor(n)]
    return _limit(settings, tensors[0].device) if tensors else 0


def tiles(
    draft: Draft, places: list[int], program: Program, settings: Settings
) -> tuple[TileProgram, list[str]] | None:
    """The draft as a program over tiles of the vocabulary, where that is possible and the better way to run it.

    Measured: on a CPU, row values are 3 to 7 % faster over tiles than over chunks of rows, with half of the memory.  On
    an H200 chunks of rows are 12 % faster for row values and 5 % for gradients.  Gradients on a CPU stay with rows too:
    it has no matmul that sums products of half precision in fp32, so a tile would upcast both of its products.  Where a
    chunk may only have so few rows that its matmuls starve, tiles are the better choice everywhere else.
    """
    if "tiles" in settings.disable or draft.group != 1 or draft.kept_rows != 0 or draft.key or draft.unless:
        return None
    hidden = value(next(iter(draft.row_inputs)).node)
    on_cpu, starved = hidden.device.type == "cpu", rows_of_chunk(draft, settings) < FEW_ROWS
    gradients = any(draft.outputs[p].kind in ("contract", "outer", "outer_t") for p in places)
    if gradients and on_cpu and hidden.dtype.itemsize < 4:
        return None
    if not starved and (gradients or not on_cpu):
        return None
    return as_tiles(draft, places, program.sinks, settings)


def rows_of_chunk(draft: Draft, settings: Settings) -> int:
    """How many rows the logits of one chunk have."""
    whole, rows = list(draft.whole_inputs), list(draft.row_inputs)
    widest = [hint(shape(whole[p.weight])[1]) * value(rows[p.hidden].node).dtype.itemsize for p in draft.projections]
    device = value(draft.origin).device.type
    return (settings.chunk_bytes or runtime.default_chunk_bytes(device)) // max(1, *widest, 1)


FEW_ROWS = 32


def group_fits(head: Head, length: Size, settings: Settings) -> bool:
    """Chunks of whole sequences of ``length`` rows are small enough for one pass over them."""
    if settings.schedule == "one-pass":
        return True
    limit = settings.chunk_bytes or 2 * runtime.default_chunk_bytes(value(head.node).device.type)
    return hint(length) * hint(head.vocabulary) * value(head.node).element_size() <= limit


def keeps_sums(component: Component, settings: Settings) -> bool:
    """Weight gradients stay in the float32 of their sums until they are multiplied by the tangent: where there are such
    sums, and where that saves a pass over them (on a CPU it would cost one)."""
    device = value(component.heads[0].node).device.type
    return device != "cpu" and settings.accumulate == "float32" and not is_one_chunk(component, settings)


def is_one_chunk(component: Component, settings: Settings) -> bool:
    """The logits of all rows are one chunk of a program that writes their gradient."""
    heads = [(h.vocabulary, h.inner) for h in component.heads]
    return component.logits_bytes <= keep.one_chunk_limit(heads, value(component.heads[0].node).device.type, settings)


def reason_to_undo(component: Component, rewrite: Rewrite, exits: list[Exit], settings: Settings) -> Rejection | None:
    """Why a region is left alone after all, now that its programs are known; None when it is worth it.

    ``min_logits_bytes=0`` asks for every region, whatever it costs.
    """
    if settings.min_logits_bytes == 0:
        return None
    contractions = sum(exit.kind in ("contract", "outer", "outer_t") for exit in exits if _belongs(exit, component))
    usual = len(component.heads) + contractions
    if rewrite.matmuls > MOST_MATMULS * usual:
        message = f"streaming takes {rewrite.matmuls} matmuls for {usual}; compute the logits of all rows in one matmul"
    elif rewrite.bytes_saved <= 0:
        chunk = settings.chunk_bytes or runtime.default_chunk_bytes(value(component.heads[0].node).device.type)
        for head in component.heads:  # a chunk holds so much of the logits of each
            fxgraph.hold_below([value(head.node)], max(chunk, nbytes(head.node) + 1))
        message = "one chunk would hold all of the logits; set a smaller grpo.chunk_bytes"
    else:
        return None
    return Rejection("UNPROFITABLE", message, component.location, component.logits_bytes)


MOST_MATMULS = 2
"""Times as many matmuls as the user's graph has: a region that needs more is left alone."""


def _belongs(exit: Exit, component: Component) -> bool:
    return any(a in component.nodes for a in exit.node.all_input_nodes)


def rewrite_of(component: Component, drafts: list[Draft], exits: list[Exit], settings: Settings) -> Rewrite:
    """The report's line for a region that was streamed.

    Before: each head's logits and, with a backward, their gradient.  After: the buffers of one chunk or tile.
    """
    running = {id(c.draft) for exit in exits for c in exit.contributions if c.draft.unless is None}
    own = [d for d in drafts if d.origin in component.nodes and id(d) in running]
    matmuls, after, late, gradients = 0, 0, False, False
    for draft in own:
        used = {c.place for exit in exits for c in exit.contributions if c.draft is draft}
        contractions = [p for p in used if draft.outputs[p].kind in ("contract", "outer", "outer_t")]
        matmuls += (0 if draft.takes_over else len(draft.projections)) + len(contractions)
        after = max(after, _buffers(draft, settings))
        late = late or draft.depth >= TANGENT_DEPTH or (bool(contractions) and _projects_again(draft, own))
        gradients = gradients or bool(contractions)
    before = component.logits_bytes * (2 if late or gradients else 1)
    patterns = sorted({name for d in own for name in d.patterns or ()})
    schedule = "two-pass" if late else "one-pass" if gradients else "forward"
    if any(d.keeps for d in own):
        schedule += ", logits kept"
    if any(d.key for d in own):
        schedule += ", metrics observed"
    if any(d.patterns is not None for d in own):
        schedule += ", vocabulary tiles"
    return Rewrite("+".join(patterns) or "engine", schedule, component.location, before, min(after, before), matmuls)


def _projects_again(draft: Draft, others: list[Draft]) -> bool:
    """A program before this one has made the same logits: the gradient is written in the forward, after sums over
    ranks."""
    mine = set(keep.projected(draft))
    return not draft.takes_over and any(
        other.depth < draft.depth and mine & set(keep.projected(other)) for other in others
    )


def _buffers(draft: Draft, settings: Settings) -> int:
    """Bytes of the logits of one chunk or tile, over all projections."""
    whole, rows, total = list(draft.whole_inputs), list(draft.row_inputs), 0
    kind = value(draft.origin).device.type
    for place, p in enumerate(draft.projections if not draft.takes_over else ()):
        size = value(rows[p.hidden].node).dtype.itemsize
        n, columns = hint(numel(draft.rows)), hint(shape(whole[p.weight])[1])
        limit = settings.chunk_bytes or runtime.default_chunk_bytes(kind)
        if draft.patterns is not None:
            columns = min(columns, runtime.tile_columns(kind))
            limit = settings.chunk_bytes or runtime.default_tile_bytes(kind)
        kept = hint(GraphBuilder.size_of(draft.kept_rows)) if place in draft.keeps else 0
        if kept < n:
            total += min(n * columns * size, max(limit, columns * size * hint(GraphBuilder.size_of(draft.group))))
        total += kept * columns * size
    return total
