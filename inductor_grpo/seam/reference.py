"""A segment program, run one torch operation after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .program import Call, SegmentProgram, accumulator


def reference(
    program: str,
    tokens: Sequence[Tensor],
    ids: Tensor,
    segments: Sequence[Tensor],
    scalars: Sequence[Tensor],
    ints: Sequence[int],
    count: int,
) -> list[Tensor]:
    """What :func:`inductor_grpo.seam.ops.segments` returns for the same arguments."""
    plan = SegmentProgram.from_text(program)
    if plan.wraps:
        ids = torch.where(ids < 0, ids + count, ids)
    named: dict[str, Any] = {f"t{i}": t for i, t in enumerate(tokens)}
    # In one shape: what promotes to which dtype was settled by the shapes in the graph, not by those here.
    named |= {f"s{i}": t.to(ids.device).expand(ids.shape) for i, t in enumerate(scalars)}
    named |= {f"n{i}": n for i, n in enumerate(ints)}
    named |= {f"g{i}": t.index_select(0, ids) for i, t in enumerate(segments)}
    for call in plan.calls:
        named[call.name] = _called(call, named, ids.device).expand(ids.shape)

    def per_token(name: str) -> Tensor:
        result = named[name] if isinstance(named[name], Tensor) else torch.tensor(named[name], device=ids.device)
        return result.to(device=ids.device, dtype=accumulator(result.dtype)).expand(ids.shape)

    sums = [_sum(per_token(name), ids, count) for name in plan.sums]
    single: dict[str, Any] = {f"z{i}": per_token(name).sum() for i, name in enumerate(plan.totals)}
    single |= {f"s{i}": t.to(ids.device) for i, t in enumerate(scalars)}
    single |= {f"n{i}": n for i, n in enumerate(ints)}
    for call in plan.after:
        single[call.name] = _called(call, single, ids.device)
    return sums + [single[name].clone() for name in plan.returned]  # an operator's outputs share no memory


def _called(call: Call, named: dict[str, Any], device: torch.device) -> Tensor:
    args = [_argument(a, named) for a in call.args]
    kwargs = {key: _argument(a, named) for key, a in call.kwargs}
    if "device" in _parameters(call.target):
        kwargs["device"] = device
    if call.target == "aten.scalar_tensor.default":
        kwargs["dtype"] = getattr(torch, call.dtype)
    return _operator(call.target)(*args, **kwargs).to(getattr(torch, call.dtype))


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
