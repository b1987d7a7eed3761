"""Triton expressions of pointwise operators: one rule a line.

Half-precision values are held in fp32 and rounded only where the graph casts to half precision.  A rule names the type
in which its operands are read: the result's (``_RESULT``), the promoted one (``_PROMOTED``: comparisons), bool
(``_LOGICAL``).  In a rule ``{0}``, ``{1}``, ``{2}`` are the operands; ``libdevice`` is CUDA's library, or what stands
in for it in Triton's interpreter (:mod:`.kernel_math`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from inductor_grpo.seam.program import Call

_TYPES = {
    torch.float16: "tl.float32",
    torch.bfloat16: "tl.float32",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
_HALF = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}
Number = bool | int | float


class Unsupported(Exception):
    """A program that has no kernel; the message says why."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An operand: its text, its dtype in the graph, and whether there is one a token (else 0-dim).

    ``number`` is that of a constant, whose ``text`` is not used.  ``wrapped`` marks what promotes like a Python number.
    """

    text: str
    dtype: torch.dtype
    per_token: bool
    wrapped: bool = False
    number: Number | None = None


def held(dtype: torch.dtype) -> str:
    """The Triton type in which a value of ``dtype`` is held.  Raises Unsupported."""
    if dtype not in _TYPES:
        raise Unsupported(f"a value of {dtype}")
    return _TYPES[dtype]


def cast(value: Value, dtype: torch.dtype, rounds: bool = False) -> str:
    """The text of ``value`` held as ``dtype``; with ``rounds`` half precision is rounded to, not only named."""
    kind = held(dtype)
    if value.number is not None:
        number = value.number
        if rounds and dtype in _HALF:
            number = torch.tensor(number, dtype=dtype).item()
        return f"tl.full([], {_literal(number, dtype)}, {kind})"
    if rounds and dtype in _HALF:
        return f"{value.text}.to({_HALF[dtype]}).to(tl.float32)"
    if held(value.dtype) == kind:
        return value.text
    return f"({value.text} != 0)" if dtype == torch.bool else f"{value.text}.to({kind})"


def _literal(number: Number, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return repr(bool(number))
    if not dtype.is_floating_point:
        return repr(int(number))
    return repr(float(number)) if math.isfinite(number) else f'float("{float(number)}")'


# Rules: what follows the operands is the call, for the few that read its keywords.
Rule = str | Callable[[Sequence[str], Call], str]


def _less_or_nan(less: str) -> str:
    return f"tl.where(({{0}} {less} {{1}}) | ({{0}} != {{0}}), {{0}}, {{1}})"


_MAXIMUM, _MINIMUM = _less_or_nan(">"), _less_or_nan("<")


def _scaled(sign: str, swapped: bool = False) -> Rule:
    def rule(x: Sequence[str], call: Call) -> str:
        alpha = _number(dict(call.kwargs).get("alpha", call.args[2] if len(call.args) > 2 else 1))
        a, b = (x[1], x[0]) if swapped else (x[0], x[1])
        if alpha == 1:
            return f"{a} {sign} {b}"
        dtype = getattr(torch, call.dtype)
        return f"{a} {sign} {b} * tl.full([], {_literal(alpha, dtype)}, {held(dtype)})"

    return rule


def _by_type(floating: str, integer: str) -> Rule:
    return lambda x, call: (floating if getattr(torch, call.dtype).is_floating_point else integer).format(*x)


def _one(call: Call) -> str:
    return f"tl.full([], 1, {held(getattr(torch, call.dtype))})"


_C_REMAINDER = "{0} % {1}"
_INT_REMAINDER = "tl.where(({0} % {1} != 0) & (({0} % {1} < 0) != ({1} < 0)), {0} % {1} + {1}, {0} % {1})"
_OTHER_SIGN = "(libdevice.fmod({0}, {1}) != 0) & ((libdevice.fmod({0}, {1}) < 0) != ({1} < 0))"
_REMAINDER = f"tl.where({_OTHER_SIGN}, libdevice.fmod({{0}}, {{1}}) + {{1}}, libdevice.fmod({{0}}, {{1}}))"
# As torch: from the C remainder, so that a quotient next to an integer is not rounded up to it first.
_FLOORED = (
    "tl.where({1} == 0, libdevice.div_rn({0}, {1}), libdevice.rint("
    f"libdevice.div_rn({{0}} - libdevice.fmod({{0}}, {{1}}), {{1}}) - tl.where({_OTHER_SIGN}, 1, 0)))"
)
_POWERS = {
    0.5: "libdevice.sqrt_rn({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    -0.5: "libdevice.rsqrt({0})",
    -1.0: "libdevice.div_rn({1}, {0})",
    -2.0: "libdevice.div_rn({1}, {0} * {0})",
}


def _power(x: Sequence[str], call: Call) -> str:
    dtype = getattr(torch, call.dtype)
    exponent = call.args[1]
    exponent = _number(exponent) if not isinstance(exponent, str) or not exponent.startswith("%") else None
    if not dtype.is_floating_point:
        if isinstance(exponent, int) and 1 <= exponent <= 8:
            return " * ".join([x[0]] * exponent)
        raise Unsupported("a power of integers")
    if exponent is not None and float(exponent) in _POWERS:
        return _POWERS[float(exponent)].format(x[0], _one(call))
    return f"libdevice.pow({x[0]}, {x[1]})"


def _divide(x: Sequence[str], call: Call) -> str:
    mode = dict(call.kwargs).get("rounding_mode", call.args[2] if len(call.args) > 2 else None)
    if getattr(torch, call.dtype).is_floating_point:
        exact = f"libdevice.div_rn({x[0]}, {x[1]})"
        return {None: exact, "trunc": f"libdevice.trunc({exact})", "floor": _FLOORED.format(*x)}[mode]
    if mode == "trunc":
        return f"{x[0]} // {x[1]}"  # Triton's integer division drops the fraction
    return f"({x[0]} - ({_INT_REMAINDER.format(*x)})) // {x[1]}"


def _clamp(x: Sequence[str], call: Call) -> str:
    bounds = dict(zip(("min", "max"), call.args[1:])) | dict(call.kwargs)
    text, rest = x[0], list(x[1:])
    for bound, rule in (("min", _MAXIMUM), ("max", _MINIMUM)):
        if bounds.get(bound) is not None:
            text = "(" + rule.format(text, rest.pop(0)) + ")"
    return text


_RESULT: dict[str, Rule] = {
    "aten.add": _scaled("+"),
    "aten.sub": _scaled("-"),
    "aten.rsub": _scaled("-", swapped=True),
    "aten.mul": _by_type("{0} * {1}", "{0} * {1}"),
    "aten.div": _divide,
    "aten.true_divide": _divide,
    "aten.neg": "-{0}",
    "aten.abs": "tl.abs({0})",
    "aten.square": "{0} * {0}",
    "aten.exp": "libdevice.exp({0})",
    "aten.exp2": "libdevice.exp2({0})",
    "aten.expm1": "libdevice.expm1({0})",
    "aten.log": "libdevice.log({0})",
    "aten.log1p": "libdevice.log1p({0})",
    "aten.log2": "libdevice.log2({0})",
    "aten.sqrt": "libdevice.sqrt_rn({0})",
    "aten.rsqrt": "libdevice.rsqrt({0})",
    "aten.erf": "libdevice.erf({0})",
    "aten.tanh": "libdevice.tanh({0})",
    "aten.reciprocal": lambda x, call: f"libdevice.div_rn({_one(call)}, {x[0]})",
    "aten.sigmoid": lambda x, call: f"libdevice.div_rn({_one(call)}, 1 + libdevice.exp(-{x[0]}))",
    "aten.relu": "tl.where(({0} > 0) | ({0} != {0}), {0}, 0)",
    "aten.pow": _power,
    "aten.maximum": _MAXIMUM,
    "aten.minimum": _MINIMUM,
    "aten.fmax": "tl.where(({0} > {1}) | ({1} != {1}), {0}, {1})",
    "aten.fmin": "tl.where(({0} < {1}) | ({1} != {1}), {0}, {1})",
    "aten.clamp": _clamp,
    "aten.clamp_min": _MAXIMUM,
    "aten.clamp_max": _MINIMUM,
    "aten.sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "aten.sgn": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "aten.floor": _by_type("libdevice.floor({0})", "{0}"),
    "aten.ceil": _by_type("libdevice.ceil({0})", "{0}"),
    "aten.round": _by_type("libdevice.rint({0})", "{0}"),
    "aten.trunc": _by_type("libdevice.trunc({0})", "{0}"),
    "aten.fmod": _by_type("libdevice.fmod({0}, {1})", _C_REMAINDER),
    "aten.remainder": _by_type(_REMAINDER, _INT_REMAINDER),
    "prims.fma": "tl.fma({0}, {1}, {2})",
    "aten.bitwise_and": "{0} & {1}",
    "aten.bitwise_or": "{0} | {1}",
    "aten.bitwise_xor": "{0} ^ {1}",
    "aten.bitwise_not": lambda x, call: f"{x[0]} == 0" if call.dtype == "bool" else f"~{x[0]}",
}
_PROMOTED: dict[str, Rule] = {
    "aten.eq": "{0} == {1}",
    "aten.ne": "{0} != {1}",
    "aten.lt": "{0} < {1}",
    "aten.le": "{0} <= {1}",
    "aten.gt": "{0} > {1}",
    "aten.ge": "{0} >= {1}",
    "aten.isnan": "{0} != {0}",
    "aten.isinf": '({0} == float("inf")) | ({0} == float("-inf"))',
    "aten.isfinite": "({0} - {0}) == 0",
}
_LOGICAL: dict[str, Rule] = {
    "aten.logical_and": "{0} & {1}",
    "aten.logical_or": "{0} | {1}",
    "aten.logical_xor": "{0} ^ {1}",
    "aten.logical_not": "{0} == 0",
}
# Copies and casts: the operand that is kept, as its place among the arguments, or the number that they are full of.
_COPIES = ("aten.clone", "aten.alias", "aten.detach", "aten._to_copy", "aten.lift_fresh_copy")
_CONSTANTS: dict[str, int | Number] = {"aten.zeros_like": 0, "aten.ones_like": 1}
_FILLED = {"aten.full": 1, "aten.full_like": 1, "aten.scalar_tensor": 0}

_OVERLOADS = {
    "aten.where": {"self", "ScalarSelf", "ScalarOther", "Scalar"},
    "aten.pow": {"Tensor_Scalar", "Tensor_Tensor", "Scalar"},
    "aten.div": {"Tensor", "Scalar", "Tensor_mode", "Scalar_mode"},
    "aten.round": {"default"},
    "aten.full": {"default"},
    "prims.convert_element_type": {"default"},
}
_ORDINARY = {"default", "Tensor", "Scalar"}
_NAMES = {*_RESULT, *_PROMOTED, *_LOGICAL, *_COPIES, *_CONSTANTS, *_FILLED, *_OVERLOADS}


def supported(target: str) -> bool:
    """Whether there is an expression for an operator, given as "aten.mul.Tensor"."""
    name, _, overload = target.rpartition(".")
    return name in _NAMES and overload in _OVERLOADS.get(name, _ORDINARY)


def expression(call: Call, values: Mapping[str, Value]) -> str:
    """The text of ``call``, held as its dtype; ``values`` maps "%t0" to what it stands for.  Raises Unsupported."""
    if not supported(call.target):
        raise Unsupported(f"no expression for {call.target}")
    name = call.target.rpartition(".")[0]
    dtype = getattr(torch, call.dtype)
    if name in _CONSTANTS or name in _FILLED:
        number = _CONSTANTS[name] if name in _CONSTANTS else call.args[_FILLED[name]]
        return cast(_operand(number, values), dtype)
    if name in _COPIES or name == "prims.convert_element_type":
        value = _operand(call.args[0], values)
        return cast(value, dtype, rounds=value.dtype != dtype or name == "prims.convert_element_type")
    operands = [_operand(x, values) for x in _operands(name, call)]
    if name == "aten.where":
        condition, *sides = operands
        a, b = (cast(side, dtype) for side in sides)
        return f"tl.where({cast(condition, torch.bool)}, {a}, {b})"
    if name in _PROMOTED:
        promoted = _promote(operands)
        return _text(_PROMOTED[name], [cast(x, promoted, rounds=x.dtype != promoted) for x in operands], call)
    if name in _LOGICAL:
        return _text(_LOGICAL[name], [cast(x, torch.bool) for x in operands], call)
    return _text(_RESULT[name], [cast(x, dtype) for x in operands], call)


def result(call: Call, values: Mapping[str, Value]) -> Value:
    """What later calls see of ``call``, under its own name."""
    if call.target == "aten.full.default" and call.args[0]:
        return Value(call.name, getattr(torch, call.dtype), True)
    read = [values[x] for x in (*call.args, *dict(call.kwargs).values()) if isinstance(x, str) and x in values]
    return Value(call.name, getattr(torch, call.dtype), any(x.per_token for x in read))


def _text(rule: Rule, texts: Sequence[str], call: Call) -> str:
    return rule(texts, call) if callable(rule) else rule.format(*texts)


def _operands(name: str, call: Call) -> list[object]:
    """The arguments that are values; alpha, rounding modes and absent bounds are not."""
    arguments = list(call.args)
    keywords = dict(call.kwargs)
    if name in ("aten.add", "aten.sub", "aten.rsub", "aten.div", "aten.true_divide"):
        return arguments[:2] + [keywords[k] for k in ("other",) if k in keywords]
    if name in ("aten.clamp", "aten.clamp_min", "aten.clamp_max"):
        arguments += [keywords[k] for k in ("min", "max") if k in keywords]
    elif keywords:
        raise Unsupported(f"{call.target} with {', '.join(keywords)}")
    return [x for x in arguments if x is not None]


def _operand(argument: object, values: Mapping[str, Value]) -> Value:
    if isinstance(argument, str) and argument.startswith("%"):
        return values[argument]
    number = _number(argument)
    dtype = torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float64
    return Value("", dtype, False, wrapped=True, number=number)


def _number(argument: object) -> Number:
    if isinstance(argument, bool | int | float):
        return argument
    if argument in ("inf", "-inf", "nan"):
        return float(str(argument))
    raise Unsupported(f"the argument {argument!r}")


def _promote(operands: Sequence[Value]) -> torch.dtype:
    def example(value: Value) -> torch.Tensor | Number:
        if value.wrapped:
            return {torch.bool: False, torch.int64: 0, torch.float64: 0.0}[value.dtype]
        return torch.empty((1,) if value.per_token else (), dtype=value.dtype, device="meta")

    if len(operands) == 1:
        return operands[0].dtype
    return torch.result_type(example(operands[0]), example(operands[1]))
