"""The run-time operator: hand-written chunk programs against float64, over chunk sizes and row counts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import inductor_grpo.ops
from inductor_grpo import body as bodies
from inductor_grpo import runtime
from inductor_grpo._compat import codegen
from inductor_grpo.program import Program, Projection, Sink

H, V = 24, 50
SIZES = (0, 1, 2, 5, 17, 64)
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)
DEVICES = ["cpu", CUDA]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def forward_program(dtype: torch.dtype, biased: bool = False, vocabulary: int | str = V) -> Program:
    """Selected log-probability and logsumexp; rows: hidden, labels [n, 1]; whole: weight [H, V] (, bias)."""
    up = "float64" if dtype == torch.float64 else "float32"
    body = f"""def body(n, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.{up})
    v1 = torch.ops.aten.amax.default(v0, [1], True)
    v2 = torch.ops.aten.sub.Tensor(v0, v1)
    v3 = torch.ops.aten.exp.default(v2)
    v4 = torch.ops.aten.sum.dim_IntList(v3, [1], True)
    v5 = torch.ops.aten.log.default(v4)
    v6 = torch.ops.aten.sub.Tensor(v2, v5)
    v7 = torch.ops.aten.gather.default(v6, 1, rows[1])
    v8 = torch.ops.aten.add.Tensor(v1, v5)
    return (v7, v8)
"""
    return Program(
        (Projection(0, 0, 1 if biased else None),), body, (Sink("row", 0, None, 1, up), Sink("row", 1, None, 1, up))
    )


def backward_program(
    dtype: torch.dtype,
    outer: str = "outer",
    accumulate: str = "float32",
    biased: bool = False,
    vocabulary: int | str = V,
    grad_dtype: torch.dtype | None = None,
) -> Program:
    """dX, dW (, dbias).

    rows: hidden, labels, logsumexp [n, 1], upstream gradient [n, 1]; whole: weight, its transpose (, bias).
    """
    up = "float64" if dtype == torch.float64 else "float32"
    width = "syms[0]" if isinstance(vocabulary, str) else str(vocabulary)
    body = f"""def body(n, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.{up})
    v1 = torch.ops.aten.sub.Tensor(v0, rows[2])
    v2 = torch.ops.aten.exp.default(v1)
    v3 = torch.ops.prims.iota.default(
        {width}, start=0, step=1, dtype=torch.int64, device=rows[1].device, requires_grad=False)
    v4 = torch.ops.aten.eq.Tensor(torch.ops.aten.unsqueeze.default(v3, 0), rows[1])
    v5 = torch.ops.prims.convert_element_type.default(v4, torch.{up})
    v6 = torch.ops.aten.sub.Tensor(v5, v2)
    v7 = torch.ops.aten.mul.Tensor(v6, rows[3])
    v8 = torch.ops.prims.convert_element_type.default(v7, torch.{name(dtype)})
    return (v8,)
"""
    result = name(grad_dtype or dtype)
    sinks = [
        Sink("contract", 0, 1, vocabulary, name(dtype)),
        Sink(outer, 0, 0, vocabulary, result, accumulate),  # type: ignore[arg-type]
    ]
    if biased:
        sinks.append(Sink("total", 0, None, vocabulary, result, accumulate))
    return Program((Projection(0, 0, 2 if biased else None),), body, tuple(sinks))


def inputs(
    n: int, dtype: torch.dtype, device: str = "cpu", v: int = V, h: int = H, seed: int = 0
) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {
        "x": torch.randn(n, h, generator=g).to(dtype),
        "w": (torch.randn(v, h, generator=g) * 0.3).to(dtype),
        "b": torch.randn(v, generator=g).to(dtype),
        "labels": torch.randint(0, v, (n, 1), generator=g),
        "g": torch.randn(n, 1, generator=g).to(torch.float64 if dtype == torch.float64 else torch.float32),
    }
    return {key: value.to(device) for key, value in made.items()}


def call(program: Program, rows, whole, n, syms=(), chunk_bytes=0, mode="inductor"):
    return torch.ops.inductor_grpo.rows(rows, whole, n, list(syms), program.to_text(), chunk_bytes, mode)


def reference(t: dict[str, torch.Tensor], biased: bool = False) -> dict[str, torch.Tensor]:
    """float64 autograd on the same (already rounded) operands."""
    x, w, b = (t[k].double().requires_grad_() for k in ("x", "w", "b"))
    logits = x @ w.t() + (b if biased else 0)
    lse = logits.logsumexp(1, keepdim=True)
    lp = logits.gather(1, t["labels"]) - lse
    (lp * t["g"].double()).sum().backward()
    return {"lp": lp.detach(), "lse": lse.detach(), "dx": x.grad, "dw": w.grad, "db": b.grad if biased else None}


def close(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert value.shape == expected.shape
    assert value.is_contiguous()
    if value.numel():
        error = (value.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= tolerance, float(error)


def both(t, n, dtype, chunk_bytes, mode, biased=False, **kw):
    """Forward and backward of the selected log-probability through the op."""
    bias = [t["b"]] if biased else []
    lp, lse = call(forward_program(dtype, biased), [t["x"], t["labels"]], [t["w"].t(), *bias], n, (), chunk_bytes, mode)
    grads = call(
        backward_program(dtype, biased=biased, **kw),
        [t["x"], t["labels"], lse, t["g"]],
        [t["w"].t(), t["w"], *bias],
        n,
        (),
        chunk_bytes,
        mode,
    )
    return (lp, lse, *grads)


@pytest.mark.sample(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_pass_matches_float64_for_every_size(device, mode, dtype):
    row = V * dtype.itemsize
    for n in SIZES:
        t = inputs(n, dtype, device)
        expected = reference(t, biased=True)
        for chunk_bytes in (0, row, 3 * row, 16 * row, 40 * row):
            got = both(t, n, dtype, chunk_bytes, mode, biased=True)
            for value, key in zip(got, ("lp", "lse", "dx", "dw", "db"), strict=True):
                want = expected[key] if key != "db" else expected[key][None]
                # log-probabilities carry the rounding of a bf16 logit; the rest is relative to its own size
                close(value, want, TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outer", ["outer", "outer_t"])
def test_float64_and_transposed_weight_gradient(device, outer):
    t = inputs(17, torch.float64, device)
    expected = reference(t)
    lp, lse, dx, dw = both(t, 17, torch.float64, 5 * V * 8, "inductor", outer=outer)
    close(dw, expected["dw"] if outer == "outer" else expected["dw"].t(), 1e-10)
    for value, key in ((lp, "lp"), (lse, "lse"), (dx, "dx")):
        close(value, expected[key], 1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_is_not_rounded_before_it_is_summed(device, dtype):
    """One row a chunk is the worst case: summing rounded products would be off by the dtype's precision."""
    n = 200
    t = inputs(n, dtype, device)
    expected = call(backward_program(dtype, grad_dtype=torch.float32), *_backward_operands(t), n, (), 0, "eager")[1]
    got = call(backward_program(dtype, grad_dtype=torch.float32), *_backward_operands(t), n, (), V * 2, "inductor")[1]
    assert got.dtype == torch.float32
    close(got, expected.double(), 5e-4)  # the body's own rounding of dlogits, which may differ by a last place
    rounded = call(backward_program(dtype, accumulate=name(dtype)), *_backward_operands(t), n, (), V * 2, "inductor")[1]
    assert (rounded.double() - expected).norm() / expected.norm() > 1e-3


def _backward_operands(t):
    lse = (t["x"].double() @ t["w"].double().t()).logsumexp(1, keepdim=True).float()
    return [t["x"], t["labels"], lse, t["g"]], [t["w"].t(), t["w"]]


def test_a_float64_sum_stays_float64():
    """``accumulate`` never lowers the precision of the result."""
    t = inputs(17, torch.float64)
    _, _, _, dw = both(t, 17, torch.float64, V * 8, "eager", accumulate="float32")
    close(dw, reference(t)["dw"], 1e-10)


TWO_HEADS = """def body(n, logits, rows, whole, syms):
    v0 = torch.ops.aten.sub.Tensor(logits[0], logits[1])
    v1 = torch.ops.aten.where.self(rows[1], v0, torch.ops.aten.full_like.default(v0, 0.0))
    v2 = torch.ops.aten.mul.Tensor(v1, whole[2])
    v3 = torch.ops.aten.sum.dim_IntList(torch.ops.aten.mul.Tensor(v2, v1), [1], True)
    v4 = torch.ops.aten.mul.Tensor(v2, 2)
    v5 = torch.ops.aten.neg.default(v4)
    return (v3, v4, v5, whole[2])
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_two_projections_mask_0dim_scalar_and_broadcast_outputs(device, mode):
    """rows: hidden, a [n, V] mask, a second hidden; whole: two weights, a 0-dim scale."""
    n, dtype = 17, torch.float32
    t, u = inputs(n, dtype, device), inputs(n, dtype, device, h=10, seed=1)
    mask = torch.rand(n, V, device=device) < 0.5
    scale = torch.tensor(0.7, device=device)
    program = Program(
        (Projection(0, 0), Projection(2, 1)),
        TWO_HEADS,
        (
            Sink("row", 0, None, 1, "float32"),
            Sink("contract", 1, 3, V, "float32"),
            Sink("outer", 1, 0, V, "float32"),
            Sink("outer_t", 2, 2, V, "float32"),
            Sink("total", 2, None, V, "float32"),
            Sink("row", 0, None, 3, "float32"),
            Sink("total", 0, None, 1, "float32"),
        ),
    )
    rows, whole = [t["x"], mask, u["x"]], [t["w"].t(), u["w"].t(), scale, t["w"]]
    d = mask * (t["x"].double() @ t["w"].double().t() - u["x"].double() @ u["w"].double().t())
    value, dlogits = (d * d * 0.7).sum(1, keepdim=True), 2 * 0.7 * d
    expected = (
        value,
        dlogits @ t["w"].double(),
        dlogits.t() @ t["x"].double(),
        -(u["x"].double().t() @ dlogits),
        -dlogits.sum(0, keepdim=True),
        value.expand(n, 3),
        value.sum(0, keepdim=True),
    )
    for chunk_bytes in (V * 4, 5 * V * 4, 0):
        for got, want in zip(call(program, rows, whole, n, (), chunk_bytes, mode), expected, strict=True):
            close(got, want, 2e-5)


def test_no_projection_chunks_by_the_widest_row_operand():
    body = "def body(n, logits, rows, whole, syms):\n    return (torch.ops.aten.amax.default(rows[0], [1], True),)\n"
    program = Program((), body, (Sink("row", 0, None, 1, "float32"), Sink("total", 0, None, 1, "float32")))
    z = torch.randn(11, V)
    value, total = call(program, [z], [], 11, (), 4 * V * 4)
    close(value, z.double().amax(1, keepdim=True), 1e-6)
    close(total, z.double().amax(1, keepdim=True).sum(0, keepdim=True), 1e-6)


def test_symbols_do_not_become_constants():
    """A width and a plain number come in as symbols; one text serves several values of both."""
    body = """def body(n, logits, rows, whole, syms):
    v0 = torch.ops.aten.mul.Tensor(logits[0], syms[1])
    return (torch.ops.aten.sum.dim_IntList(v0, [1], True), v0)
"""
    program = Program(
        (Projection(0, 0),), body, (Sink("row", 0, None, 1, "float32"), Sink("outer", 1, 0, "s0", "float32"))
    )
    for v, factor in ((50, 3), (50, 7), (50, 0), (50, 1), (33, -2)):
        t = inputs(5, torch.float32, v=v)
        value, dw = call(program, [t["x"]], [t["w"].t()], 5, [v, factor], 2 * v * 4)
        z = factor * (t["x"].double() @ t["w"].double().t())
        close(value, z.sum(1, keepdim=True), 1e-4)
        close(dw, z.t() @ t["x"].double(), 2e-5)


@pytest.mark.parametrize("layout", ["transposed", "padded", "expanded"])
def test_row_operands_of_any_stride(layout):
    n = 17
    t = inputs(n, torch.float32)
    if layout == "transposed":
        t["x"], t["g"] = t["x"].t().contiguous().t(), t["g"].expand(n, 2).t().contiguous().t()[:, :1]
    elif layout == "padded":
        t["x"] = torch.cat([t["x"], t["x"]], 1)[:, :H]
        t["labels"] = torch.cat([t["labels"], t["labels"]], 1)[:, :1]
    else:
        t["x"], t["g"] = t["x"][:1].expand(n, H), t["g"][:1].expand(n, 1)
    expected = reference(t)
    got = both(t, n, torch.float32, 5 * V * 4, "inductor")
    for value, key in zip(got, ("lp", "lse", "dx", "dw"), strict=True):
        close(value, expected[key], 2e-5)


def test_one_compilation_serves_every_row_count(monkeypatch):
    bodies.clear()
    compiled = []
    original = codegen.compile_body
    monkeypatch.setattr(codegen, "compile_body", lambda *a: compiled.append(1) or original(*a))
    for n in (64, 1, 2, 17, 5):
        t = inputs(n, torch.float32)
        both(t, n, torch.float32, 7 * V * 4, "inductor")
    assert len(compiled) == 2  # forward and backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_logits_is_written_over_the_logits(dtype):
    """The generated code of the backward body allocates nothing of [n, V]."""
    bodies.clear()
    t = inputs(17, dtype)
    both(t, 17, dtype, 0, "inductor", biased=True)
    bodies_of = [b for b in bodies.cached() if b.plan.operands]
    assert bodies_of and all(b.plan.in_place for b in bodies_of)
    for b in bodies_of:
        for source in b.sources():
            calls = source[source.index("def call(") : source.index("return (", source.index("def call("))]
            assert "empty_strided" not in calls, calls


@pytest.mark.parametrize("n", [0, 1, 17])
def test_results_are_fresh_and_contiguous(n):
    t = inputs(n, torch.float32)
    operands = [*_backward_operands(t)[0], *_backward_operands(t)[1]]
    got = call(backward_program(torch.float32), operands[:4], operands[4:], n)
    addresses = [x.untyped_storage().data_ptr() for x in (*got, *operands) if x.numel()]
    assert len(addresses) == len(set(addresses)) + 1  # w and w.t() share one
    assert all(x.is_contiguous() for x in got)


def test_opcheck():
    t = inputs(5, torch.float32)
    rows, whole = _backward_operands(t)
    for program, r, w in (
        (forward_program(torch.float32), [t["x"], t["labels"]], [t["w"].t()]),
        (backward_program(torch.float32, biased=True, vocabulary="s0"), rows, [*whole, t["b"]]),
    ):
        torch.library.opcheck(
            torch.ops.inductor_grpo.rows.default, (r, w, 5, [V], program.to_text(), 2 * V * 4, "inductor")
        )


def test_fake_keeps_sizes_symbolic_and_adds_no_guard():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        t = inputs(6, torch.float32)
        x = mode.from_tensor(torch.empty(6, H), static_shapes=False)
        n, v = x.shape[0], mode.from_tensor(torch.empty(V, 3), static_shapes=False).shape[0]
        before = len(env.guards)
        rows = [x, x.new_empty((n, 1), dtype=torch.int64), x.new_empty(n, 1), x.new_empty(n, 1)]
        whole = [x.new_empty(H, v), x.new_empty(v, H), x.new_empty(v)]
        program = backward_program(torch.float32, biased=True, vocabulary="s0")
        dx, dw, db = call(program, rows, whole, n, [v])
        assert [str(s) for s in dx.shape] == [str(n), str(H)] and str(dw.shape[0]) == str(v)
        assert db.shape[0] == 1 and t["x"].shape == (6, H)
        assert len(env.guards) == before


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.inference_mode(),
        lambda: torch.enable_grad(),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: _default_dtype(torch.float64),
        lambda: _logging_mode(),
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch.compiler.set_stance("fail_on_recompile"),
    ],
    ids=["inference", "grad", "autocast", "device", "default_dtype", "dispatch_mode", "eager_stance", "fail_stance"],
)
def test_ambient_state_does_not_reach_the_body(context):
    bodies.clear()
    t = inputs(17, torch.float32)
    expected = reference(t)
    with context():
        got = both(t, 17, torch.float32, 5 * V * 4, "inductor")
    for value, key in zip(got, ("lp", "lse", "dx", "dw"), strict=True):
        assert value.dtype == torch.float32 and value.device.type == "cpu" and not value.requires_grad
        close(value.clone(), expected[key], 2e-5)
    assert not any(b.uncompiled for b in bodies.cached())


def _logging_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    return Mode()


class _default_dtype:
    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(self.before)


def test_a_body_that_does_not_compile_runs_in_eager_and_says_so_once(monkeypatch, caplog):
    bodies.clear()

    def broken(*args):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(codegen, "compile_body", broken)
    t = inputs(17, torch.float32)
    with caplog.at_level(logging.WARNING, logger="inductor_grpo"):
        for _ in range(2):
            got = both(t, 17, torch.float32, 5 * V * 4, "inductor")
    for value, key in zip(got, ("lp", "lse", "dx", "dw"), strict=True):
        close(value, reference(t)[key], 2e-5)
    assert [r.message.count("no compiler here") for r in caplog.records if r.name == "inductor_grpo"] == [1, 1]
    bodies.clear()


def test_first_call_while_another_thread_compiles():
    bodies.clear()
    torch._dynamo.reset()
    t = inputs(17, torch.float32)
    expected = reference(t)
    failures: list[BaseException] = []

    def compile_something():
        try:
            f = torch.compile(lambda a: torch.log_softmax(a @ a.t(), -1).sum(0) + len(failures))
            f(torch.randn(12, 12))
        except BaseException as error:
            failures.append(error)

    def run():
        try:
            got = both(t, 17, torch.float32, 5 * V * 4, "inductor")
            for value, key in zip(got, ("lp", "lse", "dx", "dw"), strict=True):
                close(value, expected[key], 2e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=f) for f in (compile_something, run, run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert not any(b.uncompiled for b in bodies.cached())


@pytest.mark.parametrize("device", DEVICES)
def test_inside_a_compiled_function(device):
    """First use at run time of a compiled graph; a second row count compiles nothing of the op's own again."""
    text, back = forward_program(torch.float32).to_text(), backward_program(torch.float32).to_text()

    def f(x, w, labels, g):
        n = x.shape[0]
        lp, lse = torch.ops.inductor_grpo.rows([x * 1.0, labels], [w.t()], n, [], text, 5 * V * 4, "inductor")
        dx, dw = torch.ops.inductor_grpo.rows([x, labels, lse, g], [w.t(), w], n, [], back, 5 * V * 4, "inductor")
        return lp * 1.0, lse + 0.0, dx * 1.0, dw + 0.0

    torch._dynamo.reset()
    bodies.clear()
    compiled = torch.compile(f, dynamic=True, fullgraph=True)
    for n in (17, 9):
        t = inputs(n, torch.float32, device)
        expected = reference(t)
        got = compiled(t["x"], t["w"], t["labels"], t["g"])
        for value, key in zip(got, ("lp", "lse", "dx", "dw"), strict=True):
            close(value, expected[key], 2e-5)
    assert len(bodies.cached()) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_cuda_graphs():
    text, back = forward_program(torch.bfloat16).to_text(), backward_program(torch.bfloat16).to_text()

    def f(x, w, labels, g):
        n = x.shape[0]
        lp, lse = torch.ops.inductor_grpo.rows([x, labels], [w.t()], n, [], text, 5 * V * 2, "inductor")
        dx, dw = torch.ops.inductor_grpo.rows([x, labels, lse, g], [w.t(), w], n, [], back, 5 * V * 2, "inductor")
        return lp * 1.0, lse + 0.0, dx * 1.0, dw + 0.0

    torch._dynamo.reset()
    bodies.clear()
    compiled = torch.compile(f, mode="reduce-overhead", fullgraph=True)
    for seed in range(5):
        t = inputs(17, torch.bfloat16, "cuda", seed=seed)
        expected = reference(t)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(t["x"], t["w"], t["labels"], t["g"])
        for value, key in zip(got, ("lp", "lse", "dx", "dw"), strict=True):
            close(value.clone(), expected[key], 2e-2)
    assert not any(b.uncompiled for b in bodies.cached())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_peak_memory_is_the_sum_one_buffer_and_the_results():
    n, v, h = 2048, 16384, 256
    t = inputs(n, torch.bfloat16, "cuda", v=v, h=h)
    program, operands = backward_program(torch.bfloat16, vocabulary=v), _backward_operands(t)
    chunk = 256 * v * 2
    call(program, *operands, n, (), chunk)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call(program, *operands, n, (), chunk)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    kept = sum(r.numel() * r.element_size() for r in result)
    assert extra <= kept + v * h * 4 + chunk + 2**20, extra


def test_second_process_takes_the_body_from_the_cache(tmp_path):
    script = textwrap.dedent(
        """
        import torch
        from torch._dynamo.utils import counters
        import tests.test_ops as T
        t = T.inputs(17, torch.float32)
        T.both(t, 17, torch.float32, 5 * T.V * 4, "inductor")
        c = counters["inductor"]
        print(c["fxgraph_cache_hit"], c["fxgraph_cache_miss"], c["fxgraph_cache_bypass"])
        """
    )
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    lines = [
        subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert lines == [["0", "2", "0"], ["2", "0", "0"]]


@pytest.mark.parametrize(
    "n, row_bytes, budget",
    [(0, 100, 1000), (1, 100, 10), (17, 100, 100), (8192, 303872, 640 << 20), (5000, 1000, 1 << 20), (100, 100, 5000)],
)
def test_chunks_are_balanced_and_within_the_budget(n, row_bytes, budget):
    rows = runtime.chunk_rows(n, row_bytes, budget)
    assert rows >= 1 and rows * row_bytes <= max(budget, row_bytes)
    if n > rows:
        tail = n % rows or rows
        assert rows < 32 or rows % 16 == 0
        assert tail > rows - 512 * (-(-n // rows))


@pytest.mark.parametrize("bad", [{"codegen": "triton"}, {"chunk_bytes": -1}])
def test_bad_arguments_are_refused(bad):
    t = inputs(3, torch.float32)
    options = {"chunk_bytes": 0, "codegen": "inductor", **bad}
    with pytest.raises(ValueError, match=next(iter(bad))):
        torch.ops.inductor_grpo.rows(
            [t["x"], t["labels"]], [t["w"].t()], 3, [], forward_program(torch.float32).to_text(), *options.values()
        )


def test_use_is_read_from_the_text():
    uses = bodies.Uses.of("def body(n, logits, rows, whole, syms):\n    a = f(rows[2], rows[10], syms[0])\n", 11, 4, 1)
    assert (uses.rows, uses.whole, uses.syms) == ((2, 10), (), (0,))
    assert bodies.Uses.of("def body(n, logits, rows, whole, syms):\n    return g(*rows)\n", 3, 0, 0).rows == (0, 1, 2)
    assert inductor_grpo.ops.rows is torch.ops.inductor_grpo.rows.default


@pytest.mark.parametrize(("loss", "sums"), [("grpo", 1), ("gspo", 1), ("cross-entropy", 1), ("entropy", 3)])
def test_sums_over_the_vocabulary(loss: str, sums: int) -> None:
    """What decides whether generated code needs fp32 buffers: the sums of GSPO's sequences are over rows."""
    from inductor_grpo import body
    from inductor_grpo.tools import bench_losses, bench_measure, bench_ways

    shape = bench_losses.Shape(64, 32, 500)
    x = bench_losses.make_inputs(shape.n, shape.h, shape.v, torch.float32, "cpu")
    for name in bench_measure.TRAINED:
        x[name].requires_grad_()
    step = bench_ways.make("ours:codegen=eager,disable=tiles", bench_losses.LOSSES[loss], shape)
    bench_measure.step_of(step, x)()
    assert [body.wide_sums(b.program.body) for b in body.cached()] == [sums]
