"""The source of a segment program's kernel: one launch sums every term per segment and over all tokens.

Each block of the grid takes a tile of tokens, evaluates the terms and scans them by runs of equal ids.

- A run that lies inside a tile is a whole segment: its sum is stored at once.  What crosses a tile's edge is left as
  a *piece*: the head (a run that began in an earlier tile) and the tail (one that goes on in the next).
- The tile's part of each total is left beside the pieces.
- Segments without tokens lie between neighbouring ids; the tile that sees the gap stores their zeros.
- Every block then takes a ticket, and the block with the last one joins the pieces, again by a scan, and adds the
  parts of the totals.  All additions are in an order that depends on the ids alone: results repeat bit for bit.
- Ids out of order show when neighbours are compared.  The count of tiles that saw them travels in the ticket's upper
  half; if there are any, the blocks that saw them stay, and once the last ticket is taken and the sums are zeroed they
  add all runs again, now by **atomics**: for unsorted ids, and only for them, the order of additions is not fixed.

**Why the ticket is safe.**  A block's stores come before its barrier, the barrier before the ticket's atomic, which
releases to and acquires from the whole GPU: the last block sees the stores of all blocks, and its loads go to L2
(``.cg``), where they are.  The last block sets the ticket to zero again, and the stream's next kernel begins after it.
**Why waiting is safe.**  Blocks that stay wait a bounded number of rounds and then leave; the last block needs none of
them, since tiles are handed out by a counter and it takes all that are left.
"""

from __future__ import annotations

import hashlib
import linecache
import logging
from typing import Any

from inductor_grpo.seam.kernel_terms import Tile, Variant
from inductor_grpo.seam.kernel_text import Writer
from inductor_grpo.seam.program import SegmentProgram

__all__ = ["TICKET_WORDS", "Tile", "Variant", "kernel", "source", "work_slots"]

log = logging.getLogger(__name__)

TICKET_WORDS = 4  # int64 words a launch needs at zero, and leaves at zero: ticket, tiles handed out, leavers


def work_slots(program: SegmentProgram) -> int:
    """Eight-byte slots of scratch that a launch needs for every block, whose number is rounded up to 16."""
    return len(program.totals) + (2 * len(program.sums) + 1 if program.sums else 0)


def kernel(program: SegmentProgram, variant: Variant) -> Any:
    """The kernel as a Triton function.  Raises Unsupported."""
    text = source(program, variant)
    name = f"<inductor_grpo segments {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    log.debug("%s\n%s", name, text)
    # Triton reads the source through inspect, which finds it in linecache: no file, so nothing to share or to clean.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, name, "exec", dont_inherit=True), names)  # annotations stay the strings that Triton reads
    return names["segments"]


def source(program: SegmentProgram, variant: Variant) -> str:
    """The text of the kernel ``segments`` and its helpers.  Raises Unsupported."""
    return Writer(program, variant).text()
