"""The kernels of segment programs, against eager in float64; without CUDA they run in Triton's interpreter (see
interpreter.py)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inductor_grpo.seam import expressions, kernels, launch
from inductor_grpo.seam.program import Call, SegmentProgram, accumulator
from inductor_grpo.seam.reference import reference
from tests import interpreter
from tests.interpreter import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = kernels.Tile(tokens=32, warps=1, pieces=4, rounds=2)
runs = pytest.mark.skipif(not launch.available(), reason="needs triton, and CUDA or TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter scans token by token: small tiles give small cases many of them."""
    if INTERPRETED:
        monkeypatch.setattr(launch, "tile_of", lambda tokens: SMALL)


@interpreter.outside
def test_in_the_interpreter() -> None:
    interpreter.assert_passes(__file__)


# Programs and what eager makes of them


def call(name: str, target: str, *args: Any, dtype: str = "float32", **kwargs: Any) -> Call:
    return Call(name, target, args, tuple(kwargs.items()), dtype)


def evaluate(
    program: SegmentProgram,
    tokens: Sequence[Tensor],
    ids: Tensor,
    segments: Sequence[Tensor],
    scalars: Sequence[Tensor],
    ints: Sequence[int],
    count: int,
    exact: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs in eager, and the sums of the terms' sizes in float64; ``exact`` has all floats in float64."""

    def widen(x: Tensor) -> Tensor:
        return x.double() if exact and x.is_floating_point() else x

    at = ids.long()
    values: dict[str, Any] = {f"%t{k}": widen(x) for k, x in enumerate(tokens)}
    values |= {f"%g{k}": widen(x)[at] for k, x in enumerate(segments)}
    values |= {f"%s{k}": widen(x).to(ids.device) for k, x in enumerate(scalars)} | {
        f"%n{k}": x for k, x in enumerate(ints)
    }

    def resolve(argument: Any) -> Any:
        if isinstance(argument, str) and argument.startswith("torch."):
            dtype = getattr(torch, argument[6:])
            return torch.float64 if exact and dtype == torch.float32 else dtype
        if argument in ("inf", "-inf", "nan"):
            return float(argument)
        return values[argument] if isinstance(argument, str) and argument.startswith("%") else argument

    for c in program.calls:
        namespace, operator, overload = c.target.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        found = function(*map(resolve, c.args), **{k: resolve(v) for k, v in c.kwargs})
        values[f"%{c.name}"] = widen(found)
    outputs, sizes = [], []
    for name, per_segment in [(n, True) for n in program.sums] + [(n, False) for n in program.totals]:
        value = torch.as_tensor(values[f"%{name}"], device=ids.device).expand(ids.shape)
        value = value.to(torch.float64 if exact and value.is_floating_point() else accumulator(value.dtype))
        for x, into in ((value, outputs), (value.double().abs(), sizes)):
            if per_segment:
                where = at + count * (at < 0) if program.wraps else at
                into.append(torch.zeros(count, dtype=x.dtype, device=x.device).index_add_(0, where, x))
            else:
                into.append(x.sum())
    return outputs, sizes


def check(program: SegmentProgram, *inputs: Any) -> list[Tensor]:
    """The kernel's error is at most twice eager's and a few ulp of the terms' sizes; integers are equal."""
    found = launch.run(program.to_text(), *inputs)
    reference, sizes = evaluate(program, *inputs, exact=True)
    eager, _ = evaluate(program, *inputs, exact=False)
    names = [*program.sums, *program.totals]
    for name, ours, right, theirs, size in zip(names, found, reference, eager, sizes, strict=True):
        assert ours.dtype == accumulator(program.dtype_of(name)) and ours.shape == right.shape
        if not right.is_floating_point():
            assert torch.equal(ours, right), name
            continue
        allowed = 2 * (theirs.double() - right).abs().max() if right.numel() else 0
        ulp = 8 + (launch.tile_of(1).tokens // 2 if INTERPRETED else 0)  # the interpreter's scan adds one by one
        allowed = allowed + ulp * torch.finfo(ours.dtype).eps * size
        assert ((ours.double() - right).abs() <= allowed).all(), (name, (ours.double() - right).abs().max(), allowed)
    return found


def gspo(ids: Tensor, count: int, dtype: torch.dtype = torch.float32, wraps: bool = False) -> tuple[Any, ...]:
    """Weighted log-ratio sums, a count, what is gathered, clipped, and summed again: the seam's two stages in one."""
    d = str(dtype).removeprefix("torch.")
    program = SegmentProgram(
        tokens=(d, d, "bool", "int64"),
        segments=(d, "float32"),
        scalars=("float32",),
        calls=(
            call("v0", "aten.sub.Tensor", "%t0", "%t1", dtype=d),
            call("v1", "prims.convert_element_type.default", "%t2", "torch.float32"),
            call("v2", "aten.clamp_min.default", "%t3", 1, dtype="int64"),
            call("v3", "aten.div.Tensor", "%v1", "%v2"),
            call("v4", "prims.convert_element_type.default", "%v0", "torch.float32"),
            call("v5", "aten.mul.Tensor", "%v4", "%v3"),
            call("v6", "prims.convert_element_type.default", "%g0", "torch.float32"),
            call("v7", "aten.exp.default", "%v6"),
            call("v8", "aten.mul.Tensor", "%v7", "%g1"),
            call("v9", "aten.clamp.default", "%v7", 0.8, 1.2),
            call("v10", "aten.mul.Tensor", "%v9", "%g1"),
            call("v11", "aten.minimum.default", "%v8", "%v10"),
            call("v12", "aten.mul.Tensor", "%v11", "%s0"),
            call("v13", "aten.lt.Tensor", "%v8", "%v10", dtype="bool"),
            call("v14", "aten.where.self", "%v13", "%v12", "%v5"),
        ),
        sums=("v5", "t3", "v14", "t2"),
        totals=("v14", "t3", "t0"),
        wraps=wraps,
    )
    n, g = ids.numel(), torch.Generator().manual_seed(ids.numel() * 31 + count)
    tokens = [torch.randn(n, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)]
    tokens += [torch.rand(n, generator=g) > 0.2, torch.randint(0, 9, (n,), generator=g)]
    segments = [torch.randn(count, generator=g).to(dtype), torch.randn(count, generator=g)]
    moved = [[x.to(ids.device) for x in group] for group in (tokens, segments)]
    return program, moved[0], ids, moved[1], [torch.tensor(0.5)], [], count


# Segmentations


@st.composite
def segmentations(draw: Any) -> tuple[list[int], int, bool]:
    """Lengths of segments, many of them empty; a count beyond the last; whether the tokens are shuffled."""
    length = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 80), st.sampled_from([31, 32, 33, 64, 96]))
    lengths = draw(st.lists(length, min_size=1, max_size=12))
    gap = draw(st.sampled_from([0, 0, 1, 7, 9, 40, 100]))
    place = draw(st.integers(0, len(lengths)))
    return lengths[:place] + [0] * gap + lengths[place:], draw(st.sampled_from([0, 0, 1, 50])), draw(st.booleans())


def ids_of(lengths: Sequence[int], shuffled: bool = False, dtype: torch.dtype = torch.int64) -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(dtype)
    if shuffled:
        ids = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(len(lengths)))]
    return ids.to(DEVICE)


@runs
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(segmentations(), st.sampled_from([torch.int64, torch.int32]))
@example(([32, 32, 32], 0, False), torch.int64)
@example(([100], 0, False), torch.int64)
@example(([1] * 70, 0, True), torch.int32)
@example(([5, 200, 5], 3, False), torch.int32)
@example(([0, 0, 0], 0, False), torch.int64)
@example(([40] + [0] * 300 + [1] + [0] * 300 + [40], 0, False), torch.int64)
def test_random_segmentations(case: tuple[list[int], int, bool], dtype: torch.dtype) -> None:
    lengths, beyond, shuffled = case
    check(*gspo(ids_of(lengths, shuffled, dtype), len(lengths) + beyond))


@runs
@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
def test_token_counts(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(launch, "tile_of", lambda tokens: kernels.Tile(256, 1, 8, 2))
    lengths = [n - n // 2 - n // 3, 0, n // 2, n // 3]
    check(*gspo(ids_of(lengths), 4))


@runs
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, shuffled: bool) -> None:
    check(*gspo(ids_of([40, 0, 3, 50], shuffled), 5, dtype))


@runs
@pytest.mark.parametrize("shuffled", [False, True])
def test_ids_that_count_from_the_end(shuffled: bool) -> None:
    ids = ids_of([20, 0, 60, 17], shuffled)
    ids = torch.where(torch.arange(97, device=DEVICE) % 3 == 0, ids - 9, ids)  # the same segments, of nine
    check(*gspo(ids, 9, wraps=True))


@runs
def test_totals_alone_never_read_ids() -> None:
    program = SegmentProgram(("float32",), (), (), (), (), ("t0",))
    check(program, [torch.randn(100, device=DEVICE)], torch.full((100,), -7, device=DEVICE), [], [], [], 3)


@runs
def test_strides_and_scalars_and_integers() -> None:
    calls = (
        call("v0", "aten.mul.Tensor", "%t0", "%n1"),
        call("v1", "aten.add.Tensor", "%v0", "%s0", alpha=3),
        call("v2", "aten.ge.Scalar", "%t1", "%n0", dtype="bool"),
    )
    program = SegmentProgram(("float32", "int64"), (), ("float64",), calls, ("v1", "v2"), ("v2",))
    tokens = [torch.randn(70, 2, device=DEVICE)[:, 1], torch.arange(70, device=DEVICE).expand(2, 70)[1]]
    for scalar in (torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64, device=DEVICE)):
        check(program, tokens, ids_of([30, 40]), [], [scalar], [5, 1], 2)


@runs
def test_no_tokens_and_no_segments() -> None:
    program = SegmentProgram(("float32",), (), (), (), ("t0",), ("t0",))
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    sums, total = launch.run(program.to_text(), [empty.float()], empty, [], [], [], 0)
    assert sums.shape == (0,) and total == 0


@pytest.mark.skipif(not INTERPRETED, reason="on CUDA an assertion ends the process")
@pytest.mark.parametrize(("wraps", "ids"), [(False, [0, 1, 2]), (False, [-1, 0, 1]), (True, [-3, 0, 1])])
def test_ids_out_of_range_are_an_error(wraps: bool, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter  # which has assertions off and no option of the launch to turn them on

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    program = SegmentProgram(("float32",), (), (), (), ("t0",), (), wraps)
    with pytest.raises(Exception, match="out of range"):
        launch.run(program.to_text(), [torch.ones(3)], torch.tensor(ids), [], [], [], 2)


# Expressions: with one token a segment the sums are the values


ODD = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, 1.5, 3.0, -3.0, 1e-3, 7.25, -0.3, 20.0, -20.0]
UNARY = "neg abs square exp exp2 expm1 sqrt rsqrt reciprocal log log1p log2 sign sgn sigmoid tanh relu erf floor ceil"
BINARY = "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum fmin fmax fmod.Tensor remainder.Tensor"
COMPARE = "eq ne lt le gt ge"


def values_of(calls: Sequence[Call], tokens: Sequence[Tensor], scalars: Sequence[Tensor] = ()) -> None:
    """Every call's value at every token, against eager in the calls' dtypes, NaN where eager has NaN."""
    n = tokens[0].numel()
    dtypes = [tuple(str(x.dtype).removeprefix("torch.") for x in group) for group in (tokens, scalars)]
    program = SegmentProgram(dtypes[0], (), dtypes[1], tuple(calls), tuple(c.name for c in calls), ())
    inputs = ([x.to(DEVICE) for x in tokens], torch.arange(n, device=DEVICE), [], list(scalars), [], n)
    found = launch.run(program.to_text(), *inputs)
    right, _ = evaluate(program, *inputs, exact=False)
    for c, ours, theirs in zip(calls, found, right, strict=True):
        tolerance = 2e-2 if c.dtype in ("bfloat16", "float16") else 2e-6
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0, equal_nan=True, msg=lambda m, c=c: f"{c}\n{m}")


def names(text: str, overload: str = "default") -> list[str]:
    return [f"aten.{x}" if "." in x else f"aten.{x}.{overload}" for x in text.split()]


@runs
def test_unary_values() -> None:
    x = torch.tensor([*ODD, float("inf"), float("-inf"), float("nan")])
    unary = names(UNARY + " round trunc clone alias detach zeros_like ones_like")
    calls = [call(f"v{k}", target, "%t0") for k, target in enumerate(unary)]
    calls += [call(f"b{k}", f"aten.{t}.default", "%t0", dtype="bool") for k, t in enumerate(["isnan", "isinf"])]
    powers = [0, 0.5, 1, 2, 3, -0.5, -1, -2, 2.5, 4]
    calls += [call(f"p{k}", "aten.pow.Tensor_Scalar", "%t0", p) for k, p in enumerate(powers)]
    bounds = [(-1, 1.5), (None, 1), (0.5, None), ("-inf", 2)]
    calls += [call(f"c{k}", "aten.clamp.default", "%t0", *b) for k, b in enumerate(bounds)]
    calls += [call("c8", "aten.clamp_min.default", "%t0", 1), call("c9", "aten.clamp_max.default", "%t0", 1)]
    calls += [
        call("f0", "aten.full_like.default", "%t0", 2),
        call("l0", "aten.logical_not.default", "%t0", dtype="bool"),
    ]
    values_of(calls, [x])


def pairs(x: Sequence[float]) -> list[Tensor]:
    grid = torch.tensor(x)
    return [grid.repeat_interleave(len(x)), grid.repeat(len(x))]


@runs
def test_binary_values() -> None:
    calls = [call(f"v{k}", target, "%t0", "%t1") for k, target in enumerate(names(BINARY))]
    calls += [call(f"c{k}", target, "%t0", "%t1", dtype="bool") for k, target in enumerate(names(COMPARE, "Tensor"))]
    logical = names("logical_and logical_or logical_xor")
    calls += [call(f"l{k}", target, "%t0", "%t1", dtype="bool") for k, target in enumerate(logical)]
    calls += [
        call("r0", "aten.rsub.Scalar", "%t0", 2),
        call("r1", "aten.add.Tensor", "%t0", "%t1", alpha=-2),
        call("r2", "aten.where.self", "%c2", "%t0", "%t1"),
        call("r3", "aten.where.ScalarOther", "%c2", "%t0", "nan"),
        call("r4", "aten.where.ScalarSelf", "%c2", 1, "%t0"),
        call("r5", "aten.clamp.Tensor", "%t0", "%t1", "%s0"),
        call("r6", "aten.div.Tensor_mode", "%t0", "%t1", rounding_mode="floor"),
        call("r7", "aten.div.Tensor_mode", "%t0", "%t1", rounding_mode="trunc"),
        call("r8", "aten.mul.Tensor", "%c2", "%t0"),
        call("r9", "aten.full.default", (), "inf"),
        call("r10", "aten.minimum.default", "%t0", "%r9"),
    ]
    values_of(calls, pairs([0.0, 1.0, -1.0, 2.5, -3.0, float("nan"), float("inf")]), [torch.tensor(1.5)])


@runs
def test_integer_values() -> None:
    x, y = (t.long() for t in pairs([0, 1, -1, 3, -4, 7]))
    y = torch.where(y == 0, 2, y)
    binary = "add.Tensor sub.Tensor mul.Tensor maximum minimum fmod.Tensor remainder.Tensor"
    calls = [call(f"v{k}", t, "%t0", "%t1", dtype="int64") for k, t in enumerate(names(binary))]
    calls += [
        call(f"b{k}", t, "%t0", "%t1", dtype="int64")
        for k, t in enumerate(names("bitwise_and bitwise_or bitwise_xor", "Tensor"))
    ]
    calls += [call(f"c{k}", t, "%t0", 0.5, dtype="bool") for k, t in enumerate(names(COMPARE, "Scalar"))]
    calls += [
        call("d0", "aten.div.Tensor", "%t0", "%t1"),
        call("d1", "aten.div.Tensor_mode", "%t0", "%t1", rounding_mode="floor", dtype="int64"),
        call("d2", "aten.div.Tensor_mode", "%t0", "%t1", rounding_mode="trunc", dtype="int64"),
        call("d3", "aten.bitwise_not.default", "%c0", dtype="bool"),
        call("d4", "aten.bitwise_not.default", "%t0", dtype="int64"),
        call("d5", "aten.bitwise_and.Tensor", "%c2", "%c1", dtype="bool"),
        call("d6", "aten.exp.default", "%t0"),
        call("d7", "aten.add.Tensor", "%c0", "%t0", dtype="int64"),
        call("d8", "prims.convert_element_type.default", "%t0", "torch.uint8", dtype="uint8"),
        call("d9", "prims.convert_element_type.default", "%t0", "torch.bool", dtype="bool"),
        call("d10", "aten._to_copy.default", "%t0", dtype="float32"),
        call("d11", "aten.pow.Tensor_Scalar", "%t0", 2, dtype="int64"),
    ]
    calls[-2] = Call("d10", "aten._to_copy.default", ("%t0",), (("dtype", "torch.float32"),), "float32")
    values_of(calls, [x, y])


@runs
def test_casts_to_half_precision_round_and_comparisons_are_in_the_promoted_dtype() -> None:
    half = "float16" if INTERPRETED else "bfloat16"  # the interpreter drops digits where bfloat16 should round
    x = torch.tensor([0.1, 0.2, 0.3, 1.0, 257.0, 1e-3])
    calls = [
        call("v0", "prims.convert_element_type.default", "%t0", f"torch.{half}", dtype=half),
        call("v1", "prims.convert_element_type.default", "%v0", "torch.float32"),
        call("v2", "aten.le.Scalar", "%v0", 0.3, dtype="bool"),
        call("v3", "aten.eq.Tensor", "%v0", "%s0", dtype="bool"),
        call("v4", "prims.convert_element_type.default", "%t0", "torch.float16", dtype="float16"),
        call("v5", "aten.le.Scalar", "%t0", 0.3, dtype="bool"),
    ]
    values_of(calls, [x], [torch.tensor(0.2)])


@runs
@pytest.mark.parametrize("ids", [[0] * 5 + [2] * 4, sorted([0, 1, 1, 3] * 40), [3, 0, 1] * 40, []], ids=str)
@pytest.mark.parametrize("sums", [("v0",), ()])
def test_numbers_from_totals(ids: list[int], sums: tuple[str, ...]) -> None:
    """Whole numbers, so that every order of additions gives the same."""
    calls = (call("v0", "aten.mul.Tensor", "%t0", "%s0"), call("v1", "aten.gt.Scalar", "%t0", 2, dtype="bool"))
    after = (
        call("e0", "aten.div.Tensor", "%z0", "%s1"),
        call("e1", "prims.convert_element_type.default", "%e0", "torch.float16", dtype="float16"),
        call("e2", "aten.gt.Tensor", "%z0", "%z1", dtype="bool"),
        call("e3", "aten.add.Tensor", "%z1", "%n0", dtype="int64"),
        call("e4", "aten.scalar_tensor.default", "inf"),
        call("e5", "aten.minimum.default", "%e4", "%e0"),
    )
    finals = ("e0", "e1", "e2", "z1", "e3", "e5")
    program = SegmentProgram(
        ("float32",), (), ("float32", "float64"), calls, sums, ("v0", "v1"), after=after, finals=finals
    )
    text = program.to_text()
    assert SegmentProgram.from_text(text) == program
    tokens = [torch.arange(len(ids), dtype=torch.float32, device=DEVICE) % 7]
    scalars = [torch.tensor(3.0, device=DEVICE), torch.tensor(7.0, dtype=torch.float64)]  # the second on the host
    inputs = (tokens, torch.tensor(ids, dtype=torch.int64, device=DEVICE), [], scalars, [5], 4)
    found = launch.run(text, *inputs)
    total, above = 3 * tokens[0].sum(), (tokens[0] > 2).sum()
    quotient = total / 7
    numbers = [quotient, quotient.half(), total > above, above, above + 5, quotient]
    expected = [torch.zeros(4, device=DEVICE).index_add_(0, inputs[1], 3 * tokens[0])] * len(sums) + numbers
    for ours, right, theirs in zip(found, expected, reference(text, *inputs), strict=True):
        assert ours.dtype == right.dtype == theirs.dtype and ours.shape == right.shape == theirs.shape
        assert torch.equal(ours, right) and torch.equal(theirs, right)


def test_what_has_no_expression() -> None:
    assert launch.supported("aten.mul.Tensor") and launch.supported("aten.where.ScalarOther")
    for target in ("aten.mm.default", "aten.where.default", "aten.add.out", "aten.sum.default", "aten.round.decimals"):
        assert not launch.supported(target)
    program = SegmentProgram(("complex64",), (), (), (), (), ("t0",))
    assert launch.problem(program) == "an input of complex64"
    assert launch.problem(SegmentProgram(("float32",), (), (), (), ("t0",), ("t0",))) is None
    with pytest.raises(expressions.Unsupported, match="mm"):
        expressions.expression(call("v0", "aten.mm.default", "%t0"), {})


def test_a_kernel_is_generated_the_same_each_time() -> None:
    program = gspo(torch.zeros(3, dtype=torch.int64), 1)[0]
    variant = kernels.Variant(torch.int64, (True,), SMALL)
    assert kernels.source(program, variant) == kernels.source(SegmentProgram.from_text(program.to_text()), variant)


# On the GPU


def unequal(n: int, shuffled: bool = False) -> Tensor:
    lengths = [10] * ((n - n * 3 // 4) // 20)
    return ids_of([*lengths, n - 20 * len(lengths), *lengths], shuffled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("n", [5000, 131072, 1 << 20])
def test_sorted_ids_repeat_bit_for_bit(n: int) -> None:
    inputs = gspo(unequal(n), int(unequal(n)[-1]) + 3)
    first = check(*inputs)
    for _ in range(50):
        for a, b in zip(first, launch.run(inputs[0].to_text(), *inputs[1:]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_unsorted_ids_on_many_streams() -> None:
    ids = [unequal(131072, shuffled) for shuffled in (True, False)]
    cases = [gspo(x, 4000) for x in ids]
    streams = [torch.cuda.Stream() for _ in range(6)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                program, *inputs = cases[k % 2]
                found.append((k % 2, launch.run(program.to_text(), *inputs)))
    torch.cuda.synchronize()
    right = [evaluate(*case, exact=True)[0] for case in cases]
    for k, outputs in found:
        for ours, theirs in zip(outputs, right[k], strict=True):
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shuffled", [False, True])
def test_in_a_cuda_graph(shuffled: bool) -> None:
    program, *inputs = gspo(unequal(131072, shuffled), 4000)
    launch.run(program.to_text(), *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch.run(program.to_text(), *inputs)
    for seed in range(5):
        inputs[0][0].copy_(torch.randn(131072, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        right, _ = evaluate(program, *inputs, exact=True)
        for ours, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_under_reduce_overhead_the_scratch_memory_is_outside_of_the_graphs_pool() -> None:
    from inductor_grpo.seam import ops

    program, tokens, ids, segments, scalars, ints, count = gspo(unequal(20000), 1000)
    scalars = [s.cuda() for s in scalars]  # a graph would keep a number of the host: the pass never gives it one
    text = program.to_text()

    def step(x: Tensor) -> list[Tensor]:
        found = ops.segments([x * 2, *tokens[1:]], ids, segments, scalars, count, ints, text)
        return [y + 1 for y in found]

    compiled = torch.compile(step, mode="reduce-overhead")
    with torch.cuda.stream(torch.cuda.Stream()):  # one that has no scratch memory yet
        for seed in range(6):
            x = torch.randn(20000, generator=torch.Generator().manual_seed(seed)).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            found = [y.clone() for y in compiled(x)]
            for ours, theirs in zip(found, step(x), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("wraps", "bad"), [(False, -1), (False, 4), (True, -5), (True, 4)])
def test_ids_out_of_range_trip_the_device_assertion(wraps: bool, bad: int) -> None:
    text = SegmentProgram(("float32",), (), (), (), ("t0",), (), wraps).to_text()
    script = (
        "import torch\nfrom inductor_grpo.seam import launch\n"
        f"ids = torch.zeros(3000, dtype=torch.int64, device='cuda'); ids[2000] = {bad}\n"
        f"launch.run({text!r}, [torch.ones(3000, device='cuda')], ids, [], [], [], 4)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and "assert" in done.stderr and "a segment id is out of range" in done.stderr
