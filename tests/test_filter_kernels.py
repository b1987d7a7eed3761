"""``grpo.filter_eps`` where kernels find the live columns and move them together, against torch.

Without CUDA the kernels run in Triton's interpreter, in a process of its own (see interpreter.py).
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_grpo import filter, live_rows, packing
from inductor_grpo.filter import launch, packed
from inductor_grpo.filter.launch import Tile
from inductor_grpo.row_kernel import launch as row_kernels
from inductor_grpo.runtime import Sum
from inductor_grpo.tools import bench_losses

from . import harness, interpreter
from .test_live_rows import region as region_of
from .test_row_kernel import DEVICE, case, once, runs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy tells of each nan
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
INF, NAN, EPS = torch.inf, torch.nan, 2.0**-12
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@interpreter.outside
def test_in_the_interpreter() -> None:
    interpreter.assert_passes(__file__)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a row, several rows a program, several blocks of columns; the CPU is a device too."""
    monkeypatch.setattr(launch, "FIND", Tile(32, 1))
    monkeypatch.setattr(launch, "FIND_PARTS", 2)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(launch, "SAMPLE", 4)
    monkeypatch.setattr(launch, "COMPACT", Tile(64, 1))
    monkeypatch.setattr(launch, "PACK", Tile(32, 1))
    monkeypatch.setattr(launch, "MOVE", Tile(32, 1))
    monkeypatch.setattr(launch, "on_device", row_kernels.available)
    monkeypatch.setattr(launch, "KERNELS", launch.Kernels())
    monkeypatch.setattr(packed, "STEP", 8)
    monkeypatch.setattr(filter, "BLOCK", 16)


def gradient(n: int, v: int, dtype: torch.dtype = torch.float32, share: float = 0.3) -> Tensor:
    """Rows whose elements are next to nothing but in a share of the columns; the rows' sums are far from zero."""
    g = torch.Generator().manual_seed(n + v)
    value = 1e-5 * torch.rand(n, v, generator=g)
    live = torch.rand(v, generator=g) < share
    value[:, live] += torch.randn(n, int(live.sum()), generator=g) * (torch.rand(n, 1, generator=g) + 0.1)
    value[torch.arange(n), torch.randint(0, v, (n,), generator=g)] = 1.0
    return value.to(DEVICE, dtype)


def spoil(value: Tensor, how: str) -> None:
    """What rows of a gradient may hold besides."""
    if how == "all dead":
        value.zero_()
    elif how == "a dead row":
        value[0] = 0.0
    elif how == "all live":
        value.fill_(1.0)
    elif how in ("nan", "infinity"):
        value[-1, -1] = NAN if how == "nan" else -INF
    elif how == "underflow":
        value.fill_(1e-38)


# Finding and moving


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["", "all dead", "a dead row", "all live", "nan", "infinity", "underflow"])
@pytest.mark.parametrize("n, v", [(1, 1), (7, 131)])
def test_which_columns_are_live(n: int, v: int, how: str, dtype: torch.dtype) -> None:
    value = gradient(n, v, dtype)
    spoil(value, how)
    found = launch.find(value, EPS, v)
    assert found is not None
    columns, sums = found
    assert columns.tolist() == filter.live_columns(value, EPS).nonzero().flatten().tolist()
    if how == "all live":
        assert columns.shape[0] == v
    torch.testing.assert_close(sums, value.sum(1, dtype=torch.float32), equal_nan=True)


def test_gradients_that_no_kernel_takes() -> None:
    assert launch.find(torch.zeros(4, 8, dtype=torch.float64), EPS, 4) is None
    assert launch.find(torch.zeros(8, 4).t(), EPS, 4) is None


@runs
@pytest.mark.parametrize("most", [0, 74, 75])
def test_not_all_rows_are_read_where_most_columns_are_live(most: int) -> None:
    value = torch.zeros(21, 75, device=DEVICE)
    value[::4] = 1.0
    value[1] = torch.arange(75, device=DEVICE) / 75
    found = launch.find(value, EPS, most)
    assert found is not None and found[0].shape[0] == 75
    if most == 75:
        torch.testing.assert_close(found[1], value.sum(1))


@pytest.fixture(params=["kernels", "torch"])
def with_and_without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, and what takes their place once one did not compile."""
    if request.param == "torch":
        launch.KERNELS.problem = "it did not compile"


@runs
@pytest.mark.usefixtures("with_and_without")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("v, c, k", [(1, 1, 1), (75, 1, 9), (75, 33, 40), (9, 33, 0)])
def test_moving_rows(v: int, c: int, k: int, transposed: bool) -> None:
    x = torch.randn((c, v) if transposed else (v, c), device=DEVICE)
    x = x.t() if transposed else x
    columns = torch.randperm(v)[:k].sort().values.to(DEVICE)
    width = k + 3
    rows = launch.gather(x, columns, width)
    assert rows.shape == (width, c) and launch.is_transposed(rows) == launch.is_transposed(x)
    assert torch.equal(rows[:k], x[columns]) and not rows[k:].any()
    expected = x.clone()
    expected[columns] = -rows[:k]
    if k:
        launch.scatter(-rows, columns, x)
    assert torch.equal(x, expected)


@runs
@pytest.mark.usefixtures("with_and_without")
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_columns_move_where_they_lie(share: float, owned: bool) -> None:
    memory = torch.randn(6, 80, device=DEVICE)
    value = memory[:, :75]
    columns = (torch.rand(75) < share).nonzero().flatten().to(DEVICE)
    expected, sums = value[:, columns], value.sum(1)
    left_out = sums - expected.sum(1)
    width = min(75, columns.shape[0] + 5)
    before = memory.clone()
    found = launch.pack(value, columns, width, sums, owned)
    assert torch.equal(found[:, : columns.shape[0]], expected) and not found[:, columns.shape[0] :].any()
    torch.testing.assert_close(sums, left_out)
    assert torch.equal(memory[:, width if owned else 0 :], before[:, width if owned else 0 :])
    assert (found.data_ptr() == value.data_ptr()) == owned


# The products


@runs
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("how", ["", "all dead", "a dead row"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n, v", [(1, 75), (5, 201)])
def test_products(n: int, v: int, transposed: bool, how: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    value = gradient(n, v, dtype)
    spoil(value, how)
    weight = (torch.randn(v, 8, generator=g) + 3).to(DEVICE, dtype)
    other = torch.randn(n, 8, generator=g).to(DEVICE, dtype)
    given = weight.t().contiguous().t() if transposed else weight
    kept = filter.live_columns(value, EPS)
    wide, dead = value.double() * kept, value.double() * ~kept
    of_x = wide @ weight.double() + dead.sum(1, True) * weight[~kept].double().mean(0)
    of_w = wide.t() @ other.double()

    parts = filter.live_parts(value, EPS)
    assert parts is not None and len(parts) == 1 and parts[0].packed is not None
    filter.pack(parts, value, owned=True)
    out = torch.empty(n, 8, dtype=dtype, device=DEVICE)
    filter.contract(parts, value, given, out, {})
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * of_x.abs().max().item() / 4}
    torch.testing.assert_close(out.double(), of_x, **tolerance)
    for sum_of, first in (dtype, True), (torch.float32, True), (torch.float32, False):
        before = torch.full((v, 8), NAN if first else 2.0, dtype=sum_of, device=DEVICE)
        total = Sum(before.t().contiguous() if transposed else before, empty=first)
        filter.outer(parts, total, value, other, transposed)
        got = (total.tensor.t() if transposed else total.tensor).double()
        assert not total.empty
        torch.testing.assert_close(got, of_w if first else of_w + 2, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@runs
def test_a_gradient_that_is_not_ours_stays() -> None:
    value = gradient(5, 75)
    before = value.clone()
    parts = filter.live_parts(value, EPS)
    assert parts is not None
    filter.contract(parts, value, torch.randn(75, 8, device=DEVICE), torch.empty(5, 8, device=DEVICE), {})
    assert torch.equal(value, before)


@runs
@pytest.mark.parametrize("how", ["all live", "nan", "underflow"])
def test_most_are_live(how: str) -> None:
    value = gradient(5, 75)
    spoil(value, how)
    assert filter.live_parts(value, EPS) is None
    assert filter.live_parts(value[:0], EPS) is None


@runs
def test_what_is_not_finite_spreads() -> None:
    value = gradient(5, 75)
    spoil(value, "infinity")
    parts = filter.live_parts(value, EPS)
    assert parts is not None and parts[0].columns is not None and parts[0].columns[-1] == 74
    out = torch.empty(5, 8, device=DEVICE)
    filter.contract(parts, value, torch.randn(75, 8, device=DEVICE), out, {})
    assert not out[-1].isfinite().any() and out[:-1].isfinite().all()


# In a region


@runs
@pytest.mark.parametrize("rows", [11, 4])
@pytest.mark.parametrize("mode", ["eager+row_kernel", "eager"])
@pytest.mark.parametrize("dead", [0, 6])
def test_region(dead: int, mode: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and torch leave the same out, of rows that were packed and others; the gradient of a bias sees it all."""
    monkeypatch.setattr(packing, "on_device", row_kernels.available)
    monkeypatch.setitem(live_rows.MOVE_COST, DEVICE, 0.5)
    monkeypatch.setattr(live_rows._Watch, "update", lambda watch: setattr(watch, "share", 1.0))
    c = case("gradient", 11, 75, torch.float32)
    c.rows[1][:dead] = 0.0
    g = torch.Generator().manual_seed(1)
    hidden, weight = 8 * torch.randn(11, 8, generator=g).to(DEVICE), torch.randn(75, 8, generator=g).to(DEVICE)
    monkeypatch.setitem(filter.ROWS, DEVICE, 11)
    used: list[int] = []
    pack = launch.pack
    monkeypatch.setattr(launch, "pack", lambda value, *given: (used.append(value.shape[0]), pack(value, *given))[1])
    results = []
    for eps, kernels in (0.0, True), (2.0**-6, True), (2.0**-6, False):
        monkeypatch.setattr(launch, "on_device", lambda device, kernels=kernels: kernels)
        monkeypatch.setattr("tests.test_live_rows.Program", with_eps(eps))
        used.clear()
        results.append(region_of(c, hidden, weight, mode, rows))
        assert bool(used) == (eps > 0 and kernels)
        if used:
            assert sum(used) == 11 - dead
    plain, found, expected = results
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[1], plain[1]) and not torch.equal(found[2], plain[2])
    torch.testing.assert_close(found[3], plain[3], rtol=1e-5, atol=1e-5)


def with_eps(eps: float) -> Any:
    from inductor_grpo.program import Program

    return lambda *given: Program(*given, filter_eps=eps)


# On CUDA


POINTERS = {"FLAGS": "*i16", "COUNT": "*i32", "COLUMNS": "*i64", "SUMS": "*fp32", "LEFT": "*fp32"}


@once
@pytest.mark.parametrize(
    "name", ["find", "compact", "gather_columns", "scatter_columns", "gather_rows", "scatter_rows"]
)
def test_kernels_compile_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes no GPU; what is read as it lies is read 128 bits at a time."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inductor_grpo.filter import kernels

    monkeypatch.undo()
    tiles = {"find": launch.FIND, "compact": launch.COMPACT, "gather_rows": launch.MOVE, "scatter_rows": launch.MOVE}
    tile = tiles.get(name, launch.PACK)
    function = getattr(kernels, name)
    types = {p.name: "i32" if p.name.islower() else POINTERS.get(p.name, "*bf16") for p in function.params}
    constants: dict[str, Any] = {"BLOCK": tile.block}
    if name == "find":
        types["eps"] = "fp32"
        constants["PARTS"] = launch.FIND_PARTS
    if name == "gather_columns":
        constants["IS_SUMMED"] = True
    types |= dict.fromkeys(constants, "constexpr")
    plain = ("k", "n", "eps", "most", *constants)
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(function.params) if p.name not in plain}
    made = ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
    text = triton.compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps}).asm["ptx"]
    if name in ("find", "gather_rows", "scatter_rows"):
        assert re.search(r"ld\.global\S*\.v(2\.b64|4\.b32)", text)
    if name.endswith("rows") or name == "gather_columns":
        assert re.search(r"st\.global\S*\.v(2\.b64|4\.b32)", text)


@pytest.mark.gpu
@gpu
def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from inductor_grpo.filter import kernels

    value, weight = gradient(9, 201), torch.randn(201, 8, device="cuda")
    results = []
    for broken in (None, "gather_columns", "compact"):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "KERNELS", launch.Kernels())
            if broken:
                patch.setattr(kernels, broken, None)
            parts = filter.live_parts(value, EPS)
            assert parts is not None
            results.append(torch.empty(9, 8, device="cuda"))
            filter.contract(parts, value, weight, results[-1], {})
            assert (launch.KERNELS.problem is not None) == bool(broken)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@gpu
def test_more_elements_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    n, v = 16500, 131072
    value = torch.zeros(n, v, dtype=torch.bfloat16, device="cuda")
    value[:, 7] = 1e-6
    value[-1, [5, 131071]] = torch.tensor([3.0, -1.0], dtype=torch.bfloat16, device="cuda")
    value[:-1, 100] = 1.0
    parts = filter.live_parts(value, EPS)
    assert parts is not None and parts[0].columns is not None and parts[0].columns.tolist() == [5, 100, 131071]
    filter.pack(parts, value, owned=True)
    assert value[-1, :4].tolist() == [3, 0, -1, 0] and value[-2, :4].tolist() == [0, 1, 0, 0]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("loss", ["grpo", "entropy"])
def test_losses(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole backend with the sizes of the kernels as they are: close to the step without the filter."""
    monkeypatch.undo()
    given = bench_losses.make_inputs(1024, 256, 32003, torch.bfloat16, "cuda", peaked=8)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return bench_losses.LOSSES[loss].function({**given, "hidden": hidden, "weight": weight})

    args = [given["hidden"].requires_grad_(), given["weight"].requires_grad_()]
    used: list[int] = []
    find = launch.find
    monkeypatch.setattr(launch, "find", lambda *given: (used.append(1), find(*given))[1])
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for eps in (0.0, EPS):
            torch._dynamo.reset()
            ours = harness.run(harness.compiled(step, 2**30, filter_eps=eps, codegen="inductor"), args)
            results.append([g.double() for g in ours.gradients if g is not None])
    assert used and launch.KERNELS.problem is None
    for a, b in zip(*results, strict=True):
        assert 0 < (a - b).norm() < 0.02 * b.norm()
