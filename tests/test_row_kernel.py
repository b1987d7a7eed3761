"""Chunk bodies as one Triton program a row, and the same steps in plain torch, against eager in float64.

Without CUDA the kernels run in Triton's interpreter, in a process of its own (see interpreter.py).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_grpo.ops  # noqa: F401  (registers the operators)
from inductor_grpo import body as bodies
from inductor_grpo._compat.codegen import TensorSpec
from inductor_grpo.program import Program, Projection, Sink
from inductor_grpo.row_kernel import launch, reference
from inductor_grpo.row_kernel.launch import RowKernel, Unfit
from inductor_grpo.row_kernel.text import Store, Tile

from . import harness, interpreter
from .interpreter import INTERPRETED

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
runs = pytest.mark.skipif(
    not launch.available(torch.device(DEVICE)), reason="needs triton, and CUDA or TRITON_INTERPRET=1"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy tells of each nan


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a row, the last of them not full."""
    monkeypatch.setattr(launch, "TILE", Tile(32, 1, 3))
    bodies.clear()


@interpreter.outside
def test_in_the_interpreter() -> None:
    interpreter.assert_passes(__file__)


# Bodies, as text that is evaluated in float64 too: UP is the dtype of the maths, DOWN that of the logits.
# rows: label, upstream gradient, old log-prob, advantage, a mask [n, V]; whole: [1, V], 0-dim.

LOGP = """
    z = logits[0].to(UP)
    logp = z.log_softmax(1)
    picked = logp.gather(1, rows[0])
"""
ONE_HOT = "(torch.arange(z.shape[1], device=z.device).unsqueeze(0) == rows[0]).to(UP)"
BODIES = {
    "logp": (1, LOGP + "    return (picked, z.amax(1, True))"),
    "gradient": (1, LOGP + f"    return (picked, (({ONE_HOT} - logp.exp()) * rows[1]).to(DOWN))"),
    "clipped": (
        1,
        LOGP
        + f"""
    ratio = (picked - rows[2]).exp()
    inside = (ratio >= 0.8) & (ratio <= 1.2)
    less = ratio * rows[3] < ratio.clamp(0.8, 1.2) * rows[3]
    g = torch.where(inside | less, ratio * rows[3], 0.0)
    return (picked, ratio, (({ONE_HOT} - logp.exp()) * g).to(DOWN))""",
    ),
    "logsumexp": (
        1,
        f"""
    z = logits[0].to(UP)
    lse = z.logsumexp(1, True)
    picked = z.gather(1, rows[0]) - lse
    d = ({ONE_HOT} - (z - lse).exp()) * rows[1] + 2e-2 * lse * (z - lse).exp()
    return (picked, lse, d.to(DOWN))""",
    ),
    "entropy": (
        2,
        LOGP
        + f"""
    p = logp.exp()
    entropy = -(p * logp).sum(1, True)
    return (picked, entropy, (({ONE_HOT} - p) * rows[1] - p * (logp + entropy) * 0.01).to(DOWN))""",
    ),
    "soft-cap": (
        1,
        f"""
    t = torch.tanh(logits[0].to(UP) / 3)
    z = t * 3 / whole[1] + whole[0]
    logp = z.log_softmax(1)
    d = ({ONE_HOT} - logp.exp()) * rows[1] / whole[1] * (1 - t * t)
    return (logp.gather(1, rows[0]), d.to(DOWN))""",
    ),
    "ignored": (
        2,
        """
    z = logits[0].to(UP)
    known = rows[0] != 3
    label = torch.where(known, rows[0], 0)
    logp = z.log_softmax(1)
    hot = (torch.arange(z.shape[1], device=z.device).unsqueeze(0) == torch.where(known, rows[0], -100)).to(UP)
    g = torch.where(known, rows[1], 0.0)
    smooth = logp.mean(1, True)
    return (torch.where(known, -logp.gather(1, label), 0.0), smooth, (g * logp.exp() - hot * g).to(DOWN))""",
    ),
    "masked": (
        1,
        f"""
    z = logits[0].to(UP).masked_fill(rows[4], -torch.inf)
    logp = z.log_softmax(1)
    d = torch.where(rows[4], 0.0, ({ONE_HOT} - logp.exp()) * rows[1])
    return (logp.exp().gather(1, rows[0]), z.amin(1, True), d.to(DOWN))""",
    ),
    "two heads": (
        2,
        LOGP
        + """
    other = logits[1].to(UP).log_softmax(1)
    kl = (logp.exp() * (logp - other)).sum(1, True)
    return (picked, kl, (logp.exp() * (logp - other - kl)).to(DOWN), (other.exp() - logp.exp()).to(DOWN))""",
    ),
    "three deep": (
        3,
        LOGP
        + """
    entropy = (logp.exp() * logp).sum(1, True)
    spread = (logp.exp() * (logp - entropy) * (logp - entropy)).sum(1, True)
    return (entropy, spread)""",
    ),
}


@dataclasses.dataclass(eq=False)
class Case:
    """A body, its inputs, and the values that it must give."""

    text: str
    dtype: torch.dtype
    logits: list[Tensor]
    rows: list[Tensor]
    whole: list[Tensor]

    def source(self, wide: bool = False) -> str:
        up = torch.float64 if wide or self.dtype == torch.float64 else torch.float32
        down = torch.float64 if wide else self.dtype
        return "def body(n, logits, rows, whole, syms):" + self.text.replace("UP", str(up)).replace("DOWN", str(down))

    def values(self, wide: bool = False) -> list[Tensor]:
        """What eager gives, in float64 or in the case's dtypes."""

        def widened(some: list[Tensor]) -> list[Tensor]:
            return [x.double() if wide and x.is_floating_point() else x for x in some]

        n = self.logits[0].shape[0]
        function = bodies.load(self.source(wide))
        return [v.clone() for v in function(n, *map(widened, (self.logits, self.rows, self.whole)), ())]

    @functools.cache  # noqa: B019
    def kernel(self) -> RowKernel:
        """The row kernel; a gradient goes over the logits of its place among the gradients."""

        def flat(n: Any, *tensors: Tensor) -> Any:
            parts = [list(tensors[:a]), list(tensors[a : a + b]), list(tensors[a + b :])]
            return list(bodies.load(self.source())(n, *parts, ()))

        a, b = len(self.logits), len(self.rows)
        by_row = [TensorSpec((None, x.shape[1]), (x.shape[1], 1), x.dtype, x.device) for x in self.logits + self.rows]
        whole = [TensorSpec(tuple(x.shape), x.stride(), x.dtype, x.device) for x in self.whole]
        return RowKernel(flat, [("n", 64)], by_row + whole, (0, a, b, len(whole)), self.stores(), self.logits[0].device)

    def stores(self) -> list[Store | None]:
        found: list[Store | None] = []
        for value in self.values():
            place = sum(s is not None for s in found)
            found.append(Store(self.dtype, place) if value.shape[1] == self.logits[0].shape[1] > 1 else None)
        return found


def case(name: str, n: int, v: int, dtype: torch.dtype, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    up = torch.float64 if dtype == torch.float64 else torch.float32
    count = 2 if name == "two heads" else 1
    logits = [(3 * torch.randn(n, v, generator=g)).to(dtype) for _ in range(count)]
    rows = [torch.randint(0, v, (n, 1), generator=g), *(torch.randn(n, 1, generator=g).to(up) for _ in range(3))]
    rows.append(torch.rand(n, v, generator=g) < 0.3)
    whole = [torch.randn(1, v, generator=g).to(dtype), torch.tensor(0.7, dtype=up)]
    parts = [[x.to(DEVICE) for x in part] for part in (logits, rows, whole)]
    return Case(BODIES[name][1], dtype, *parts)


def by_kernel(c: Case) -> list[Tensor]:
    """The values as the kernel gives them; gradients lie where the logits were."""
    kernel = c.kernel()
    n, buffers = c.logits[0].shape[0], [x.clone() for x in c.logits]
    results = []
    for store, out in zip(kernel.stores, kernel.plan.outputs):
        fresh = torch.full((n, 1), 77, dtype=out.meta["val"].dtype, device=c.logits[0].device)
        results.append(fresh if store.buffer is None else buffers[store.buffer])
    own = [x for x, store in zip(results, kernel.stores) if store.buffer is None]
    kernel(n, (), buffers, c.rows, c.whole, own)
    return results


def by_reference(c: Case) -> list[Tensor]:
    found, plan = [], c.kernel().plan
    for columns in (7, 32, 1000):
        found.append(reference.run(plan, c.logits, c.rows, c.whole, (), columns))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            torch.testing.assert_close(a, b, rtol=2e-2 if c.dtype.itemsize < 4 else 1e-4, atol=1e-3, equal_nan=True)
    return found[0]


def check(c: Case, values: list[Tensor], ulps: int = 8) -> None:
    """No further from float64 than twice eager's error and a few ulp; nan and infinities where eager has them."""
    for got, eager, exact in zip(values, c.values(), c.values(wide=True), strict=True):
        assert got.shape == eager.shape and got.dtype == eager.dtype
        assert torch.equal(harness.kinds(got), harness.kinds(eager))
        least = ulps * torch.finfo(got.dtype).eps
        if INTERPRETED and got.dtype == torch.bfloat16:
            least += torch.finfo(got.dtype).eps  # it drops digits where it should round
        assert harness.error(got, exact) <= 2 * harness.error(eager, exact) + least


once = pytest.mark.skipif(INTERPRETED, reason="runs in the first process")
WAYS = [pytest.param(by_reference, id="reference", marks=once), pytest.param(by_kernel, id="kernel", marks=runs)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str, way: Any) -> None:
    c = case(name, 5, 75, torch.float32)
    assert len(c.kernel().plan.passes) == BODIES[name][0]
    check(c, way(c))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["clipped", "entropy", "soft-cap"])
def test_dtypes(name: str, dtype: torch.dtype, way: Any) -> None:
    check(case(name, 3, 75, dtype), way(case(name, 3, 75, dtype)), ulps=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n, v", [(1, 1), (3, 1), (1, 2), (2, 31), (2, 32), (1, 33), (2, 64)])
def test_sizes(n: int, v: int, way: Any) -> None:
    for name in ("clipped", "logsumexp"):
        c = case(name, n, v, torch.float32)
        check(c, way(c))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gradient", "logsumexp", "entropy", "masked", "ignored"])
def test_what_is_not_finite(name: str, way: Any) -> None:
    c = case(name, 9, 70, torch.float32)
    inf = torch.inf
    z, labels, mask = c.logits[0], c.rows[0], c.rows[4]
    z[0] = -inf
    z[1, 5:] = -inf
    z[2, 3] = inf
    z[3, 3] = z[3, 60] = inf
    z[4, 69] = torch.nan
    z[5, 0], z[5, 50], z[5, 66] = torch.nan, inf, -inf
    z[6] = torch.linspace(-3e4, 3e4, 70)
    z[7, :64] = -inf
    labels[:3] = torch.tensor([[3], [6], [3]])
    mask[8] = True
    check(c, way(c))


@runs
@pytest.mark.skipif(not INTERPRETED, reason="an assertion of the device ends the process's CUDA")
def test_a_label_out_of_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    for wrong in (-1, 75):
        c = case("logp", 4, 75, torch.float32)
        c.kernel()  # which runs the body to know its values
        c.rows[0][2] = wrong
        with pytest.raises(Exception, match="index out of bounds"):
            by_kernel(c)
        with pytest.raises(RuntimeError, match="index out of bounds"):
            by_reference(c)


def test_offsets_are_wide() -> None:
    """Rows times columns go beyond 32 bits."""
    text = case("gradient", 2, 75, torch.bfloat16).kernel().source
    assert "row = tl.program_id(0).to(tl.int64)" in text
    assert "before = row * 75" in text


@once
@pytest.mark.parametrize("name", ["clipped", "two heads"])
def test_kernels_compile_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes no GPU; the interpreter is less strict about types."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(launch, "TILE", Tile(4096, 8, 2))
    kernel = case(name, 2, 150016, torch.bfloat16).kernel()
    function = kernel.function
    types = {p.name: p.annotation for p in function.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(function.params) if p.name.startswith("Z")}
    made = ASTSource(fn=function, signature=types, constexprs={}, attrs=aligned)
    options = {"num_warps": kernel.tile.warps, "debug": True, "sanitize_overflow": False, "enable_fp_fusion": False}
    text = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ex2.approx" in text
    assert len(re.findall(r"ld\.global\S*\.v4", text)) >= 2 * len(kernel.plan.passes)  # 128 bits at a time


UNFIT = {
    "return (logits[0].float().cumsum(1)[:, -1:],)": "no expression|neither a row value",
    "return (logits[0].float().sort(1)[0].amax(1, True),)": "no expression|several values",
    "return (logits[0].float() - logits[0].float().sum(0, True),)": "dimensions",
    "return (logits[0].float() * rows[1],)": "nothing is reduced",
    "return (logits[0].float().gather(1, torch.cat([rows[0], rows[0]], 1)).sum(1, True),)": "no expression|rows are",
    "return (logits[0].float()[:, :7].amax(1, True),)": "no expression|neither",
    "return (rows[1].reshape(-1, 2).sum(1, True).expand(-1, 2).reshape(-1, 1) + logits[0].float().amax(1, True),)": (
        "cannot be traced|rows are not apart|dimensions|one column|neither"
    ),
}


@once
@pytest.mark.parametrize("text", UNFIT)
def test_what_has_no_row_kernel(text: str) -> None:
    c = dataclasses.replace(case("logp", 4, 75, torch.float32), text="\n    " + text)
    with pytest.raises(Unfit, match=UNFIT[text]):
        c.kernel()


@once
def test_four_passes_are_too_many() -> None:
    text = (
        "\n    x = logits[0].float()\n" + "    x = (x * x.sum(1, True)).tanh()\n" * 3 + "    return (x.sum(1, True),)"
    )
    with pytest.raises(Unfit, match="4 passes"):
        dataclasses.replace(case("logp", 4, 75, torch.float32), text=text).kernel()


# The operator


def program(c: Case) -> Program:
    sinks = (
        Sink("row", 0, None, 1, "float32"),
        Sink("contract", 1, 1, 75, "float32"),
        Sink("outer", 1, 5, 75, "float32"),
        Sink("total", 1, None, 75, "float32"),
    )
    return Program((Projection(5, 2),), c.source(), sinks)


def operator(c: Case, mode: str, text: str | None = None) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(k, 8, generator=g).to(DEVICE) for k in (11, 75))
    whole = [c.whole[0], weight, weight.t(), c.whole[1]]
    rows = [*c.rows, hidden]
    return torch.ops.inductor_grpo.rows(rows, whole, 11, [], text or program(c).to_text(), 4 * 75 * 4, mode)


@runs
def test_chunks_of_a_region() -> None:
    """Row values, gradients over the logits, their products and their sum; the last chunk is short."""
    c = case("gradient", 11, 75, torch.float32)
    got, expected = operator(c, "eager+row_kernel"), operator(c, "eager")
    assert [b.no_row_kernel for b in bodies.cached()].count(None) == 1
    assert any("def rows_of" in text for b in bodies.cached() for text in b.sources())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_other_bodies_stay_as_they_are() -> None:
    c = case("gradient", 11, 75, torch.float32)
    plain = dataclasses.replace(c, text="\n    return (rows[1], logits[0] * rows[1])")
    text = program(plain).to_text()
    for a, b in zip(operator(plain, "eager+row_kernel", text), operator(plain, "eager", text), strict=True):
        assert torch.equal(a, b)
    reasons = {b.no_row_kernel for b in bodies.cached()}
    expected = "nothing is reduced" if launch.available(torch.device(DEVICE)) else "need CUDA and Triton"
    assert any(expected in str(reason) for reason in reasons)
    assert "grpo.row_kernel is off" in reasons


def test_a_cpu_runs_none() -> None:
    if INTERPRETED:
        pytest.skip("the interpreter takes the CPU's tensors")
    assert not launch.available(torch.device("cpu"))


@runs
@pytest.mark.parametrize("name", ["grpo", "entropy"])
def test_losses(name: str) -> None:
    """Through the whole backend."""
    from inductor_grpo.tools import bench_losses

    given = bench_losses.make_inputs(24, 16, 96, torch.float32, DEVICE)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return bench_losses.LOSSES[name].function({**given, "hidden": hidden, "weight": weight})

    args = [given["hidden"].requires_grad_(), given["weight"].requires_grad_()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = harness.run(harness.compiled(loss, 7 * 96 * 4, row_kernel="on", disable="tiles"), args)
    assert [b.no_row_kernel for b in bodies.cached()] == [None]
    eager, exact = harness.run(loss, args), harness.run(loss, args, wide=True)
    assert not harness.problems(ours, eager, exact, harness.floor(args))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA")
def test_more_elements_than_32_bits_count() -> None:
    """The last rows of a buffer of more than 2**31 elements."""
    n, v = 16500, 131072
    z = torch.zeros(n, v, dtype=torch.bfloat16, device="cuda")
    z[-1, 5] = 3.0
    labels = torch.full((n, 1), 5, device="cuda")
    rows = [labels, torch.ones(n, 1, device="cuda"), *(torch.zeros(n, 1, device="cuda") for _ in range(2))]
    small = case("gradient", 2, v, torch.bfloat16)
    rows.append(small.rows[4])
    kernel = small.kernel()
    picked = torch.empty(n, 1, device="cuda")
    kernel(n, (), [z], rows, small.whole, [picked])
    expected = 3.0 - torch.logsumexp(torch.tensor([3.0] + [0.0] * (v - 1), dtype=torch.float64), 0)
    assert abs(picked[-1].item() - expected.item()) < 1e-4
    assert abs(z[-1, 5].item() - (1 - expected.exp().item())) < 1e-2
    assert abs(z[0, 5].item() - 1) < 1e-2
