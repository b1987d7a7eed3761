"""The custom operator ``inductor_grpo::segments``: one segment program (:mod:`inductor_grpo.seam.program`), run.

On CUDA with Triton it is one kernel (:mod:`inductor_grpo.seam.launch`); everywhere else the program is run operation
by operation, which is also what the kernel is tested against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import launch, native
from .program import SegmentProgram, accumulator

NAMESPACE = "inductor_grpo"
_ARGUMENTS = (
    "(Tensor[] tokens, Tensor ids, Tensor[] segments, Tensor[] scalars, SymInt count, SymInt[] ints, str program)"
    " -> Tensor[]"
)
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "flexible_layout") if hasattr(torch.Tag, name))

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _segments(
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

    Returns the program's sums, each ``[count]``, then its totals, 0-dim, in fp32 or better (integers in int64).  With
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


def reference(
    program: str,
    tokens: Sequence[Tensor],
    ids: Tensor,
    segments: Sequence[Tensor],
    scalars: Sequence[Tensor],
    ints: Sequence[int],
    count: int,
) -> list[Tensor]:
    """The same, one torch operation after the other."""
    plan = SegmentProgram.from_text(program)
    if plan.wraps:
        ids = torch.where(ids < 0, ids + count, ids)
    named: dict[str, Any] = {f"t{i}": t for i, t in enumerate(tokens)}
    # In one shape: what promotes to which dtype was settled by the shapes in the graph, not by those here.
    named |= {f"s{i}": t.to(ids.device).expand(ids.shape) for i, t in enumerate(scalars)}
    named |= {f"n{i}": n for i, n in enumerate(ints)}
    named |= {f"g{i}": t.index_select(0, ids) for i, t in enumerate(segments)}
    for call in plan.calls:
        args = [_argument(a, named) for a in call.args]
        kwargs = {key: _argument(a, named) for key, a in call.kwargs}
        if "device" in _parameters(call.target):
            kwargs["device"] = ids.device
        if call.target == "aten.scalar_tensor.default":
            kwargs["dtype"] = getattr(torch, call.dtype)
        result = _operator(call.target)(*args, **kwargs)
        named[call.name] = result.to(getattr(torch, call.dtype)).expand(ids.shape)

    def per_token(name: str) -> Tensor:
        result = named[name] if isinstance(named[name], Tensor) else torch.tensor(named[name], device=ids.device)
        return result.to(device=ids.device, dtype=accumulator(result.dtype)).expand(ids.shape)

    sums = [_sum(per_token(name), ids, count) for name in plan.sums]
    return sums + [per_token(name).sum() for name in plan.totals]


def _sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add_(0, ids, values)


def _argument(value: Any, named: dict[str, Any]) -> Any:
    if isinstance(value, tuple):
        return [_argument(v, named) for v in value]
    if not isinstance(value, str):
        return value
    if value.startswith("%"):
        return named[value[1:]]
    if value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return float(value) if value in ("inf", "-inf", "nan") else value


@functools.cache
def _operator(target: str) -> Callable[..., Any]:
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return cast("Callable[..., Any]", found)


@functools.cache
def _parameters(target: str) -> frozenset[str]:
    schema: Any = getattr(_operator(target), "_schema")  # noqa: B009
    return frozenset(a.name for a in schema.arguments)


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

    def empty(name: str, sizes: list[int]) -> Tensor:
        return torch.empty(sizes, dtype=accumulator(plan.dtype_of(name)), device=ids.device)

    return [empty(name, [count]) for name in plan.sums] + [empty(name, []) for name in plan.totals]


_library.define("segments" + _ARGUMENTS, tags=_TAGS)
_library.impl("segments", _segments, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::segments", _fake, lib=_library)

segments = torch.ops.inductor_grpo.segments.default
