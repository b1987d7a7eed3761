"""Rows without a gradient: what a row kernel tells of them, and how a device packs the others.

Without CUDA the kernels run in Triton's interpreter, in a process of its own (see interpreter.py).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_grpo import body as bodies
from inductor_grpo import live_rows, packing, runtime
from inductor_grpo.packing import DevicePacking
from inductor_grpo.program import Program, Projection, Sink
from inductor_grpo.row_kernel import launch
from inductor_grpo.tools import bench_losses

from . import harness, interpreter
from .test_row_kernel import DEVICE, Case, case, once, runs, small_tiles  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy tells of each nan
INF = torch.inf


@interpreter.outside
def test_in_the_interpreter() -> None:
    interpreter.assert_passes(__file__)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are packed by kernels, and worth it, where the interpreter takes the CPU for a device too."""
    monkeypatch.setattr(packing, "on_device", launch.available)
    monkeypatch.setitem(live_rows.MOVE_COST, "cpu", 0.5)
    monkeypatch.setitem(live_rows.MOVE_COST, "cuda", 0.5)
    if DEVICE == "cuda":  # looks at its first step
        monkeypatch.setattr(live_rows._Watch, "update", lambda watch: setattr(watch, "share", 1.0))


# What a kernel tells


def run(c: Case, skips: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The kernel's row values, its gradients, and their live rows."""
    kernel, n = c.kernel(), c.logits[0].shape[0]
    buffers = [x.clone() for x in c.logits]
    values = []
    for store, out in zip(kernel.stores, kernel.plan.outputs):
        fresh = torch.full((n, 1), 77, dtype=out.meta["val"].dtype, device=DEVICE)
        values.append(fresh if store.buffer is None else buffers[store.buffer])
    own = [x for x, store in zip(values, kernel.stores) if store.buffer is None]
    live = kernel(n, (), buffers, c.rows, c.whole, own, skips)
    return own, [values[i] for i in kernel.filled], live


def with_dead_rows(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """Rows 0, 2, 4 and 9 have no coefficient; logits that are not finite are in rows with one and without."""
    c = case(name, 10, 75, dtype)
    for coefficient in c.rows[1], c.rows[3]:
        coefficient[[0, 4, 9]] = 0.0
        coefficient[2] = -0.0
    c.logits[0][3, 74] = -INF
    c.logits[0][4, 0] = -INF
    c.logits[0][5, 40] = INF
    c.logits[0][6, 70] = torch.nan
    c.logits[-1][9, 33] = torch.nan
    return c


SKIPPING = {"gradient": True, "clipped": True, "masked": True, "ignored": True, "entropy": False, "two heads": False}


@pytest.mark.sample(2)
@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", SKIPPING)
def test_live_rows_of_a_kernel(name: str, dtype: torch.dtype) -> None:
    c = with_dead_rows(name, dtype)
    finite = torch.stack([x.isfinite().all(1) for x in c.logits]).all(0)
    _, gradients, live = run(c, skips=False)
    assert len(live) == len(gradients) == (2 if name == "two heads" else 1)
    assert c.kernel().checked == set(range(len(c.logits)))
    for gradient, known in zip(gradients, live, strict=True):
        assert known.dtype == torch.int8
        assert known.ne(0).tolist() == (gradient.ne(0).any(1) | ~finite).tolist()
        if SKIPPING[name]:
            assert known[[0, 2]].tolist() == [0, 0]
        assert known[4] and known[9] and known[5] and known[6]


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SKIPPING)
def test_rows_that_need_no_gradient_are_not_written(name: str, dtype: torch.dtype) -> None:
    c = with_dead_rows(name, dtype)
    assert c.kernel().skips == SKIPPING[name]
    (values, gradients, live), (others, left, same) = run(c, skips=False), run(c, skips=True)
    for a, b in zip(values + live, others + same, strict=True):
        assert torch.equal(a.nan_to_num(55.0), b.nan_to_num(55.0))
    skipped = (live[0] == 0) & SKIPPING[name]
    assert skipped[[0, 2]].all() == SKIPPING[name]
    for a, b in zip(gradients, left, strict=True):
        assert torch.equal(a[~skipped].nan_to_num(55.0), b[~skipped].nan_to_num(55.0))
        assert not a[skipped].any()
    if SKIPPING[name]:
        assert torch.equal(left[0][skipped], c.logits[0][skipped])


UNKNOWN = {
    "an exponent of unknown size": "d = z.exp() * rows[1] + z.sum(1, True) * 0",
    "one of another row's size": "d = (2 * z - z.amax(1, True)).exp() * rows[1]",
    "a factor that may be infinite": "d = (z - z.amax(1, True)) * rows[1]",
    "what is added to it": "d = (z - z.amax(1, True)).exp() * rows[1] + z",
    "what it is divided by": "d = (z - z.amax(1, True)).exp() * rows[1] / z",
}


@runs
@pytest.mark.parametrize("why", UNKNOWN)
def test_what_may_not_be_zero_is_written(why: str) -> None:
    text = f"\n    z = logits[0].to(UP)\n    {UNKNOWN[why]}\n    return (z.sum(1, True), d.to(DOWN))"
    c = dataclasses.replace(case("gradient", 4, 75, torch.float32), text=text)
    assert not c.kernel().skips


@runs
def test_a_row_whose_factor_may_overflow_is_written() -> None:
    """What is known of the numbers decides row by row."""
    text = """
    z = logits[0].to(UP)
    d = (z - z.amax(1, True) - rows[2]).exp() * rows[1] * rows[3]
    return (z.amax(1, True), d.to(DOWN))"""
    c = dataclasses.replace(case("gradient", 6, 75, torch.float32), text=text)
    c.rows[1][:] = 0.0
    c.rows[2][:] = torch.tensor([[0.0], [-200.0], [INF], [torch.nan], [-INF], [0.0]])
    c.rows[3][5] = INF
    assert c.kernel().skips
    _, (gradient,), (live,) = run(c, skips=True)
    assert torch.equal(gradient[0], c.logits[0][0]) and torch.equal(gradient[2], c.logits[0][2])
    assert gradient[[1, 3, 4, 5]].isnan().any(1).all()
    assert live.tolist() == [0, 1, 0, 1, 1, 1]


# How a device packs


@runs
@pytest.mark.parametrize("n, columns", [(1, 5), (150, 1), (150, 3), (150, 8), (150, 8300), (1100, 4)])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99, 1.0])
def test_packing(n: int, share: float, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the live rows once, dead ones up to a multiple, and all of those zero."""
    monkeypatch.setattr(packing, "PLAN_BLOCK", 128)
    monkeypatch.setattr(packing, "PROGRAMS", 7)
    g = torch.Generator().manual_seed(2)
    value = torch.randn(n, columns, generator=g).to(DEVICE, torch.bfloat16)
    live = (torch.rand(n, generator=g) < share).to(DEVICE)
    packed = DevicePacking(live.to(torch.int8) * 3, least=0)
    moved = value.clone()
    packed.pack(moved)
    alive, kept, *_ = packed.counts
    assert alive == live.sum().item()
    assert kept == min(n, -(-alive // packing.step_of(n)) * packing.step_of(n))
    order = packed.order
    assert order.shape[0] == kept == order.unique().shape[0]
    assert set(live.nonzero().flatten().tolist()) <= set(order.tolist())
    expected = value * live.unsqueeze(1)
    assert torch.equal(packed.rows_in_place(moved), expected[order])
    assert torch.equal(packed.rows(value), value[order])
    result = torch.full((n, columns), 7.0, device=DEVICE)
    room = packed.room(result)
    room.copy_(expected[order])
    packed.spread(room, result)
    assert torch.equal(result, expected.float())


@runs
def test_few_dead_rows_stay_where_they_are() -> None:
    live = torch.ones(500, dtype=torch.int8, device=DEVICE)
    live[[3, 77]] = 0
    value = torch.randn(500, 6, device=DEVICE)
    expected = value * live.unsqueeze(1)
    packed = DevicePacking(live, least=3)
    packed.pack(value)
    assert packed.counts == [498, 500, 0, 2]
    assert torch.equal(value, expected)


@once
@pytest.mark.parametrize("name", ["plan", "pack", "spread"])
def test_kernels_compile_for_cuda(name: str) -> None:
    """Which takes no GPU; rows move 128 bits at a time."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inductor_grpo.row_kernel import moves

    function = getattr(moves, name)
    pointers = {"LIVE": "*i8", "COUNTS": "*i32", "X": "*i64" if name == "pack" else "*bf16"}
    types = {p.name: "i32" if p.name.islower() else pointers.get(p.name, "*i64") for p in function.params}
    types["BLOCK"] = "constexpr"
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(function.params) if p.name in ("X", "columns")}
    made = ASTSource(fn=function, signature=types, constexprs={"BLOCK": packing.BLOCK}, attrs=aligned)
    text = triton.compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    if name != "plan":
        assert re.search(r"ld\.global\S*\.v(2\.b64|4\.b32)", text) and re.search(
            r"st\.global\S*\.v(2\.b64|4\.b32)", text
        )


# Both in a region


N, V, H = 11, 75, 8


def program(c: Case, contract: int = 2, outer: int = 5) -> Program:
    gradient = len(c.values()) - 1
    sinks = (
        Sink("row", 0, None, 1, "float32"),
        Sink("contract", gradient, contract, V, "float32"),
        Sink("outer", gradient, outer, V, "float32"),
        Sink("total", gradient, None, V, "float32"),
    )
    return Program((Projection(5, 1),), c.source(), sinks)


def region(c: Case, hidden: Tensor, weight: Tensor, mode: str, rows: int = N, apart: bool = False) -> list[Tensor]:
    """With ``apart``, products read copies of hidden and weight, whose values logits say nothing of."""
    more = (hidden.clone(), weight.clone()) if apart else (hidden, weight)
    whole = [c.whole[0], weight.t(), weight, c.whole[1], more[1]]
    text = program(c, *((4, 6) if apart else (2, 5))).to_text()
    return torch.ops.inductor_grpo.rows(
        [*c.rows, hidden, more[0]], whole, c.rows[0].shape[0], [], text, rows * V * 4, mode
    )


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product with the weight."""
    found: list[int] = []
    contract = runtime._Loop._contract

    def record(value: Tensor, weight: Tensor, out: Tensor) -> None:
        found.append(value.shape[0])
        contract(value, weight, out)

    monkeypatch.setattr(runtime._Loop, "_contract", staticmethod(record))
    return found


def check(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.sample(2)
@runs
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("apart", [False, True], ids=["same", "apart"])
@pytest.mark.parametrize("rows", [N, 4])
@pytest.mark.parametrize("bad", ["nothing", "hidden of a dead row", "hidden of a live row", "weight"])
@pytest.mark.parametrize("name", ["gradient", "masked", "entropy"])
def test_region(name: str, bad: str, rows: int, apart: bool, multiplied: list[int], monkeypatch: Any) -> None:
    c = case(name, N, V, torch.float32)
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(k, H, generator=g).to(DEVICE) for k in (N, V))
    live = [1, 2, 6, 9, 10]
    dead = [i for i in range(N) if i not in live]
    c.rows[1][dead] = 0.0
    if bad == "weight":
        weight[5, 2] = INF
    elif bad != "nothing":
        hidden[3 if "dead" in bad else 6, 3] = torch.nan
    read: list[int] = []
    largest = live_rows._largest
    monkeypatch.setattr(live_rows, "_largest", lambda x: (read.append(x.shape[1]), largest(x))[1])
    got = region(c, hidden, weight, "eager+row_kernel", rows, apart)
    assert [b.no_row_kernel for b in bodies.cached()] == [None]
    assert read == [H] * (apart * -(-N // rows))  # not the gradient, and hidden only where logits say nothing of it
    if name != "entropy" and bad in ("nothing", "hidden of a dead row", "hidden of a live row"):
        assert sum(multiplied) == len(live) + ("dead" in bad)
    if bad == "weight":
        assert sum(multiplied) == N
    with monkeypatch.context() as patch:
        patch.setattr(runtime.LiveRows, "pack", lambda self, value, *_: (value, None))
        check(got, region(c, hidden, weight, "eager", rows, apart))


@runs
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("bad", ["nothing", "hidden", "weight"])
def test_without_a_row_kernel(bad: str, multiplied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient, hidden and the weight are read, and kernels pack the rows."""
    c = case("gradient", N, V, torch.float32)
    c.rows[1][[0, 3, 4, 5, 7, 8]] = 0.0
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(k, H, generator=g).to(DEVICE) for k in (N, V))
    if bad != "nothing":
        (hidden if bad == "hidden" else weight)[3, 2] = torch.nan
    got = region(c, hidden, weight, "eager")
    assert multiplied == [{"nothing": 5, "hidden": 6, "weight": N}[bad]]
    monkeypatch.setattr(runtime.LiveRows, "pack", lambda self, value, *_: (value, None))
    check(got, region(c, hidden, weight, "eager"))


@runs
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("live", [[], [0], list(range(N))], ids=["none", "one", "all"])
def test_how_many_are_live(live: list[int], multiplied: list[int]) -> None:
    c = case("gradient", N, V, torch.float32)
    c.rows[1][[i for i in range(N) if i not in live]] = 0.0
    hidden, weight = torch.randn(N, H, device=DEVICE), torch.randn(V, H, device=DEVICE)
    got = region(c, hidden, weight, "eager+row_kernel")
    assert multiplied == [len(live)]
    check(got, region(c, hidden, weight, "eager"))


@runs
@pytest.mark.usefixtures("on_device")
def test_one_dead_row_is_too_few(monkeypatch: pytest.MonkeyPatch, multiplied: list[int]) -> None:
    """Its gradient was left out, and is zero all the same."""
    monkeypatch.setitem(live_rows.MOVE_COST, DEVICE, H / 4)
    c = case("gradient", N, V, torch.float32)
    c.rows[1][4] = 0.0
    hidden, weight = torch.randn(N, H, device=DEVICE), torch.randn(V, H, device=DEVICE)
    got = region(c, hidden, weight, "eager+row_kernel")
    assert multiplied == [N]
    check(got, region(c, hidden, weight, "eager"))


@runs
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("schedule", ["one-pass", "two-pass"])
def test_losses(schedule: str, codegen: str, multiplied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole backend: where the body with the gradient is a row kernel, neither it nor hidden nor the weight
    is read to find the dead rows."""
    given = bench_losses.make_inputs(24, 16, 96, torch.float32, DEVICE)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        picked = logp.gather(-1, given["labels"].unsqueeze(-1)).squeeze(-1)
        return (picked * (torch.arange(24, device=DEVICE) % 3 == 0)).sum()

    if schedule == "one-pass":
        monkeypatch.setattr(live_rows, "_largest", None)
        monkeypatch.setattr(runtime.LiveRows, "_is_finite", None)
    args = [given["hidden"].requires_grad_(), given["weight"].requires_grad_()]
    options = {"row_kernel": "on", "disable": "tiles", "schedule": schedule, "codegen": codegen}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = harness.run(harness.compiled(loss, 24 * 96 * 4, **options), args)
    assert multiplied == [8]
    eager, exact = harness.run(loss, args), harness.run(loss, args, wide=True)
    assert not harness.problems(ours, eager, exact, harness.floor(args))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_second_step_packs(multiplied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first watches: what the kernel told it of its rows arrives a step later."""
    monkeypatch.setattr(live_rows, "_watches", {})
    n, hidden_size = 2048, 4096
    c = case("gradient", n, V, torch.float32)
    c.rows[1][: n // 2] = 0.0
    hidden, weight = torch.randn(n, hidden_size, device="cuda"), torch.randn(V, hidden_size, device="cuda") / 64
    steps = []
    for _ in range(2):
        steps.append(region(c, hidden, weight, "eager+row_kernel", n))
        torch.cuda.synchronize()
    assert multiplied == [n, n // 2]
    for a, b in zip(*steps, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
