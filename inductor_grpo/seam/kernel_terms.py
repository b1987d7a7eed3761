"""The inputs of a segment program's kernel and the text that evaluates its terms for some tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from inductor_grpo.seam.expressions import Unsupported, Value, expression, held, result
from inductor_grpo.seam.program import SegmentProgram, accumulator

POINTED = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i8",  # by its byte
}


class Tile(NamedTuple):
    """How a kernel is cut: tokens a block, warps a block, pieces joined at a time, rounds that a block waits.

    One or two tokens a thread are best: with more, the scan goes over as many rows one after the other, or values move
    between the layouts that suit scans and those that suit scattered stores.
    """

    tokens: int
    warps: int
    pieces: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a kernel is generated for beside the program.

    ``host_scalars`` says which scalars are passed as numbers; ``single`` that one tile has all tokens.
    """

    ids: torch.dtype
    host_scalars: tuple[bool, ...]
    tile: Tile
    single: bool = False
    interpreted: bool = False


class TermWriter:
    """Writes the helpers of a kernel: ``terms``, and the operators of its scans and reductions."""

    def __init__(self, program: SegmentProgram, variant: Variant) -> None:
        self.program, self.variant = program, variant
        self.sums = [held(accumulator(program.dtype_of(name))) for name in program.sums]
        self.totals = [held(accumulator(program.dtype_of(name))) for name in program.totals]
        self.uses_ids = bool(program.sums or program.segments)
        self.ints = program.ints

    def inputs(self) -> list[str]:
        program = self.program

        def dtypes(names: Sequence[str]) -> list[torch.dtype]:
            return [getattr(torch, name) for name in names]

        found = [f"T{k}: '*{pointed(d)}'" for k, d in enumerate(dtypes(program.tokens))]
        found += [f"IDS: '*{pointed(self.variant.ids)}'"]
        found += [f"G{k}: '*{pointed(d)}'" for k, d in enumerate(dtypes(program.segments))]
        for k, (d, host) in enumerate(zip(dtypes(program.scalars), self.variant.host_scalars, strict=True)):
            found.append(f"s{k}: '{host_type(d)}'" if host else f"S{k}: '*{pointed(d)}'")
        return found + [f"n{x[2:]}: 'i64'" for x in self.ints]

    def terms(self, inputs: Sequence[str]) -> list[str]:
        """``terms(at, live, ...)``: the ids of some tokens and, zero where not ``live``, all that is summed."""
        program = self.program
        values: dict[str, Value] = {}
        body = []
        if self.uses_ids:
            body += [
                "i = tl.load(IDS + at, mask=live, other=0).to(tl.int64)",
                *(["i = tl.where(i < 0, i + count, i)"] if program.wraps else []),
                'tl.device_assert((i >= 0) & (i < count), "a segment id is out of range", mask=live)',
                "live = live & (i >= 0) & (i < count)  # memory stays safe where assertions are off",
                "i = tl.where(live, i, 0).to(tl.int32)",
            ]
        else:
            body += ["i = at"]
        for k, d in enumerate(program.tokens):
            values[f"%t{k}"] = self._read(body, f"t{k}", f"tl.load(T{k} + at, mask=live, other=0)", d, True)
        for k, d in enumerate(program.segments):
            values[f"%g{k}"] = self._read(body, f"g{k}", f"tl.load(G{k} + i, mask=live, other=0)", d, True)
        self._read_scalars(body, values)
        for call in program.calls:
            body.append(f"{call.name} = {expression(call, values)}")
            values[f"%{call.name}"] = result(call, values)
        returned = ["i"]
        for kind, names, types in (("a", program.sums, self.sums), ("p", program.totals, self.totals)):
            for k, (name, accumulated) in enumerate(zip(names, types, strict=True)):
                value = values[f"%{name}"].text
                body.append(f"{kind}{k} = tl.where(live, ({value}).to({accumulated}), tl.full([], 0, {accumulated}))")
                returned.append(f"{kind}{k}")
        body.append(f"return {', '.join(returned)}{',' if len(returned) == 1 else ''}")
        return ["@triton.jit", f"def terms(at, live, {', '.join(inputs)}, count):", *indent(body), "", ""]

    def store_results(self, totals: Sequence[str]) -> list[str]:
        """What is computed and stored once all totals are known, as these texts."""
        program = self.program
        values: dict[str, Value] = {}
        body: list[str] = []
        if program.after:
            self._read_scalars(body, values)
        for k, text in enumerate(totals):
            body.append(f"z{k} = {text}")
            values[f"%z{k}"] = Value(f"z{k}", program.dtype_of(f"z{k}"), False)
        for call in program.after:
            body.append(f"{call.name} = {expression(call, values)}")
            values[f"%{call.name}"] = result(call, values)
        for k, name in enumerate(program.returned):
            value = values[f"%{name}"]
            byte = ".to(tl.int8)" if value.dtype == torch.bool else ""
            body.append(f"tl.store(RESULT{k}, {value.text}{byte})")
        return body

    def _read_scalars(self, body: list[str], values: dict[str, Value]) -> None:
        for k, (d, host) in enumerate(zip(self.program.scalars, self.variant.host_scalars, strict=True)):
            values[f"%s{k}"] = self._read(body, f"x{k}", f"s{k}" if host else f"tl.load(S{k})", d, False)
        for name in self.ints:
            values[name] = Value(f"{name[1:]}.to(tl.int64)", torch.int64, False, wrapped=True)

    def _read(self, body: list[str], name: str, text: str, dtype: str, per_token: bool) -> Value:
        kind = held(getattr(torch, dtype))
        body.append(f"{name} = ({text} != 0)" if kind == "tl.int1" else f"{name} = ({text}).to({kind})")
        return Value(name, getattr(torch, dtype), per_token)

    # Combining functions

    def combine(self, name: str, types: Sequence[str]) -> list[str]:
        """The operator of a scan by runs: the flag says that a run begins between the two."""
        left = [f"a{k}" for k in range(len(types))]
        right = [f"b{k}" for k in range(len(types))]
        sums = [f"tl.where(g != 0, {b}, {a} + {b})" for a, b in zip(left, right, strict=True)]
        head = f"def {name}(f, {', '.join(left)}, g, {', '.join(right)}):"
        return ["@triton.jit", head, f"    return f | g, {', '.join(sums)}", "", ""]

    def merge(self) -> list[str]:
        """The operator of a tile's reduction: totals are added, what was found about the ids is kept at its largest."""
        totals = [f"{side}{k}" for side in "ab" for k in range(len(self.totals))]
        n = len(self.totals)
        left, right = totals[:n], totals[n:]
        merged = [f"{a} + {b}" for a, b in zip(left, right, strict=True)]
        if self.sums:
            left, right = [*left, "x"], [*right, "y"]
            merged += ["tl.maximum(x, y)"]
        if not merged:
            return []
        comma = "," if len(merged) == 1 else ""
        head = f"def merge({', '.join(left)}, {', '.join(right)}):"
        returned = f"    return {', '.join(merged)}" if not comma else f"    return {merged[0]}"
        return ["@triton.jit", head, returned, "", ""]


def host_type(dtype: torch.dtype) -> str:
    """The type in which a scalar on the CPU is passed."""
    return "fp64" if dtype == torch.float64 else "fp32" if dtype.is_floating_point else "i64"


def pointed(dtype: torch.dtype) -> str:
    """The type that a pointer to ``dtype`` points to.  Raises Unsupported."""
    found = POINTED.get(dtype)
    if found is None:
        raise Unsupported(f"an input of {str(dtype).removeprefix('torch.')}")
    return found


def indent(lines: Sequence[str], depth: int = 1) -> list[str]:
    """The lines, ``depth`` levels in."""
    return ["    " * depth + line for line in lines]
