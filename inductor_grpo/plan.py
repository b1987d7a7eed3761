"""Whether a region is worth streaming, and how it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import Settings
from .depth import TANGENT_DEPTH
from .draft import Draft
from .exits import Exit
from .graph import hint, nbytes
from .heads import Head
from .program import Program, TileProgram
from .report import Rejection, Rewrite, human
from .tiling import as_tiles

if TYPE_CHECKING:
    from .stream import Component


def smallest_vocabulary(heads: list[Head]) -> int:
    """V of the narrowest head, as seen while compiling."""
    return min(hint(head.vocabulary) for head in heads)


def reason_to_leave(component: Component, settings: Settings, rewrites: int) -> Rejection | None:
    """Why a region that could be streamed is left alone; None when it is not."""
    size, limit = component.logits_bytes, settings.min_logits_bytes
    if "engine" in settings.disable:
        return Rejection("DISABLED", "grpo.disable names the engine", component.location, size)
    if settings.max_rewrites is not None and rewrites >= settings.max_rewrites:
        message = f"grpo.max_rewrites allows {settings.max_rewrites} rewrites in one graph"
        return Rejection("DISABLED", message, component.location, size)
    if size < limit:
        message = f"logits of {human(size)} are below grpo.min_logits_bytes ({human(limit)}); lower it to rewrite them too"
        return Rejection("TOO_SMALL", message, component.location, size)
    return None


def tiles(draft: Draft, places: list[int], program: Program, settings: Settings) -> tuple[TileProgram, list[str]] | None:
    """The draft as a program over tiles of the vocabulary, where that is possible and the better way to run it."""
    return as_tiles(draft, places, program.sinks, settings)


def rewrite_of(component: Component, drafts: list[Draft], exits: list[Exit], settings: Settings) -> Rewrite:
    """The report's line for a region that was streamed."""
    own = [d for d in drafts if d.origin in component.nodes]
    matmuls, after = 0, 0
    for draft in own:
        used = {c.place for exit in exits for c in exit.contributions if c.draft is draft}
        contractions = [p for p in used if draft.outputs[p].kind in ("contract", "outer", "outer_t")]
        matmuls += len(draft.projections) + len(contractions)
        limit = settings.chunk_bytes or DEFAULT_CHUNK_BYTES
        after = max(after, sum(min(limit, nbytes(h.node)) for h in component.heads))
    widest = max(nbytes(n) for n in component.nodes)
    backward = any(d.depth >= TANGENT_DEPTH for d in own)
    before = max(component.logits_bytes, widest)
    patterns = sorted({name for d in own for name in d.patterns or ()})
    schedule = "two-pass" if backward else "forward"
    if any(d.patterns is not None for d in own):
        schedule += ", vocabulary tiles"
    return Rewrite("+".join(patterns) or "engine", schedule, component.location, before, min(after, before), matmuls)


DEFAULT_CHUNK_BYTES = 64 << 20
"""What the report takes one chunk to be when the device decides."""
