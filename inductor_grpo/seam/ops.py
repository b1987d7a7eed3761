"""The custom operator ``inductor_grpo::segments``: one segment program (:mod:`inductor_grpo.seam.program`), run.

On CUDA with Triton it is one kernel (:mod:`inductor_grpo.seam.launch`); everywhere else the program is run operation
by operation, which is also what the kernel is tested against.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import launch, native
from .program import SegmentProgram
from .reference import reference

NAMESPACE = "inductor_grpo"
_ARGUMENTS = (
    "(Tensor[] tokens, Tensor ids, Tensor[] segments, Tensor[] scalars, SymInt count, SymInt[] ints, str program)"
    " -> Tensor[]"
)
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "flexible_layout") if hasattr(torch.Tag, name))

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def run(
    tokens: Sequence[Tensor],
    ids: Tensor,
    segments: Sequence[Tensor],
    scalars: Sequence[Tensor],
    count: int,
    ints: Sequence[int],
    program: str,
) -> list[Tensor]:
    """Sums token terms per segment and over all tokens.

    tokens    ``[N]``, any strides
    ids       ``[N]``, int64 or int32: the segment of each token
    segments  ``[S']`` with ``S' >= count``: values that tokens read by their id
    scalars   0-dim, of any device
    count     the number of segments, may be 0
    ints      integers that the program names ``%n<i>``

    Returns the program's sums, each ``[count]``, in fp32 or better (integers in int64), then its 0-dim results.  With
    sorted ids the result is bitwise the same in every run.
    Raises IndexError for an id outside of ``[0, count)`` (on CUDA: an assertion of the device).
    """
    if ids.is_cuda and _launchable(program) and all(t.numel() >= count for t in segments):
        return launch.run(program, tokens, ids, segments, scalars, ints, count)
    if not ids.is_cuda and (plain := _plain(program)) is not None:
        places, wraps = plain
        return native.segment_sums([tokens[i] for i in places], ids, count, wraps)
    return reference(program, tokens, ids, segments, scalars, ints, count)


@functools.cache
def _launchable(program: str) -> bool:
    return launch.available() and launch.problem(SegmentProgram.from_text(program)) is None


@functools.cache
def _plain(program: str) -> tuple[list[int], bool] | None:
    """For a program that only sums its inputs per segment: which of them, and whether ids wrap."""
    plan = SegmentProgram.from_text(program)
    if plan.calls or plan.totals or any(name[0] != "t" for name in plan.sums):
        return None
    return [int(name[1:]) for name in plan.sums], plan.wraps


def _fake(
    tokens: Sequence[Tensor],
    ids: Tensor,
    segments: Sequence[Tensor],
    scalars: Sequence[Tensor],
    count: int,
    ints: Sequence[int],
    program: str,
) -> list[Tensor]:
    """Shapes and dtypes alone; the count is never compared, so no guard comes from here."""
    plan = SegmentProgram.from_text(program)

    sizes = [[count]] * len(plan.sums) + [[]] * len(plan.returned)
    return [torch.empty(s, dtype=d, device=ids.device) for s, d in zip(sizes, plan.output_dtypes())]


_library.define("segments" + _ARGUMENTS, tags=_TAGS)
_library.impl("segments", run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::segments", _fake, lib=_library)

segments = torch.ops.inductor_grpo.segments.default
