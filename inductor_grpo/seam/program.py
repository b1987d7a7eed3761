"""A segment program: per-token terms and their sums per segment and over all tokens, as data.

One call of ``inductor_grpo::segments`` runs one program: the token terms are pointwise maths over tensors with one
value a token, tensors with one value a segment (read through the ids) and scalars; they are summed in one pass.  As
with :mod:`inductor_grpo.program`, the text of the program is an argument of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import torch

from inductor_grpo.program import read


@dataclasses.dataclass(frozen=True)
class Call:
    """One pointwise operation.

    ``target`` is an operator of ``torch.ops`` ("aten.mul.Tensor"), ``dtype`` that of its result ("float32").  In
    ``args`` and ``kwargs`` a string "%t0" names a value, and other strings, numbers, bools and None are themselves;
    "torch.float32" is a dtype, "inf", "-inf" and "nan" are the numbers.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class SegmentProgram:
    """Token terms and their sums.

    ``tokens``, ``segments``, ``scalars``  the dtypes of the inputs.  A token sees ``%t<i>`` (its element of
               ``tokens[i]``, ``[N]``), ``%g<i>`` (the element of ``segments[i]``, ``[S]``, at its id), ``%s<i>``
               (``scalars[i]``, 0-dim) and ``%n<i>`` (``ints[i]``, an integer)
    ``calls``  in order; each sees the inputs and the calls before it
    ``sums``   names of the values ("t0", "v3") that are summed per segment: outputs ``[S]``
    ``totals`` names of the values that are summed over all tokens: outputs, 0-dim

    A call whose inputs are scalars gives a scalar; summed, it counts once a token.
    ``wraps``  whether a negative id counts from the end, as in indexing; otherwise it is an error, as in index_add
    ``after``  calls on 0-dim values once the totals are known: ``%z<i>`` (``totals[i]``, in its accumulator's dtype),
               scalars, ints and the calls of ``after`` before it
    ``finals``  names of 0-dim values that are outputs; None for all totals
    """

    tokens: tuple[str, ...]
    segments: tuple[str, ...]
    scalars: tuple[str, ...]
    calls: tuple[Call, ...]
    sums: tuple[str, ...]
    totals: tuple[str, ...]
    wraps: bool = False
    after: tuple[Call, ...] = ()
    finals: tuple[str, ...] | None = None

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the 0-dim outputs, which come after the sums."""
        return tuple(f"z{i}" for i in range(len(self.totals))) if self.finals is None else self.finals

    @property
    def ints(self) -> list[str]:
        """The integers that are read, as "%n0", in order."""
        return sorted({x for c in (*self.calls, *self.after) for x in c.args if isinstance(x, str) and x[:2] == "%n"})

    def output_dtypes(self) -> list[torch.dtype]:
        """Of the sums and then of the 0-dim outputs."""
        return [accumulator(self.dtype_of(name)) for name in self.sums] + [self.dtype_of(n) for n in self.returned]

    def to_text(self) -> str:
        """The program as JSON; equal programs give equal text."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def from_text(text: str) -> SegmentProgram:
        """Reads what :meth:`to_text` wrote."""
        data = read(text)

        def calls(key: str) -> tuple[Call, ...]:
            return tuple(
                Call(c["name"], c["target"], _frozen(c["args"]), _frozen(c["kwargs"]), c["dtype"]) for c in data[key]
            )

        names = {key: tuple(data[key]) for key in ("tokens", "segments", "scalars", "sums", "totals")}
        finals = None if data["finals"] is None else tuple(data["finals"])
        return SegmentProgram(calls=calls("calls"), wraps=data["wraps"], after=calls("after"), finals=finals, **names)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a value, without its ``%``."""
        kind, place = name[0], name[1:]
        if kind == "n":
            return torch.int64
        if kind == "z":
            return accumulator(self.dtype_of(self.totals[int(place)]))
        inputs = {"t": self.tokens, "g": self.segments, "s": self.scalars}
        calls = (*self.calls, *self.after)
        found = inputs[kind][int(place)] if kind in inputs else next(c.dtype for c in calls if c.name == name)
        return getattr(torch, found)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are summed and the sums returned: fp32 for half precision, int64 for integers."""
    if dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
