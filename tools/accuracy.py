"""How near a result is to what float64 gives: user code run in float64, the error, and what of it is rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FLOOR = {
    torch.float64: 16 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}
"""A few units in the last place, allowed beside twice eager's own error: eager is exact by luck now and then."""


class Widen(TorchFunctionMode):
    """Sends every cast to a floating dtype that the function spells out to float64.

    ``secretly``: tensors say that they are float32, for functions that assert that."""

    def __init__(self, secretly: bool = False) -> None:
        super().__init__()
        self.secretly = secretly

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.secretly and func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]  # new at each look
            dtype = func(*args)
            return torch.float32 if dtype is torch.float64 else dtype
        if func in (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half):
            return args[0].double()

        def wide(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def widened(secretly: bool = False) -> Iterator[None]:
    """Runs the enclosed eager code in float64, buffers made inside included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widen(secretly):
            yield
    finally:
        torch.set_default_dtype(before)


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``max|value - reference| / max|reference|`` over what is finite in both; absolute where the divisor is 0."""
    value, reference = value.double(), reference.double()
    finite = value.isfinite() & reference.isfinite()
    if not finite.any():
        return 0.0
    scale = reference[finite].abs().max().item()
    return (value - reference)[finite].abs().max().item() / (scale or 1.0)
