"""The tiles op by itself: a hand-written program for selected log-probs and one for their gradients."""

from __future__ import annotations

import pytest
import torch

import inductor_grpo.ops  # registers the op
from inductor_grpo import tiles
from inductor_grpo.program import Projection, Sink, TileProgram

H, V = 24, 101

FORWARD_TILE = """def tile(n, start, columns, logits, rows, whole, syms):
    v0 = torch.ops.aten.sub.Tensor(rows[1], start)
    v1 = operator.sub(columns, 1)
    v2 = torch.ops.aten.clamp.default(v0, 0, v1)
    v3 = torch.ops.aten.eq.Tensor(v0, v2)
    v4 = torch.ops.prims.convert_element_type.default(v3, torch.float32)
    v5 = torch.ops.prims.convert_element_type.default(logits[0], torch.float32)
    v6 = torch.ops.aten.gather.default(v5, 1, v2)
    v7 = torch.ops.aten.full.default([1, 1], 0, dtype=torch.float32, device=rows[1].device)
    v8 = torch.ops.aten.where.self(v3, v6, v7)
    return (v4, v8, v5)
"""
FORWARD_FINISH = """def finish(n, statistics, rows, whole, syms):
    v0 = torch.ops.aten.log.default(statistics[3])
    v1 = torch.ops.aten.add.Tensor(statistics[2], v0)
    v2 = torch.ops.aten.sub.Tensor(statistics[1], v1)
    return (v2, v1)
"""
BACKWARD_TILE = """def tile(n, start, columns, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.float32)
    v1 = torch.ops.aten.exp.default(torch.ops.aten.sub.Tensor(v0, rows[2]))
    device = rows[1].device
    v2 = torch.ops.prims.iota.default(columns, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False)
    v3 = torch.ops.aten.add.Tensor(torch.ops.aten.reshape.default(v2, [1, columns]), start)
    v4 = torch.ops.aten.eq.Tensor(v3, rows[1])
    v5 = torch.ops.prims.convert_element_type.default(v4, torch.float32)
    v6 = torch.ops.aten.mul.Tensor(torch.ops.aten.sub.Tensor(v5, v1), rows[3])
    v7 = torch.ops.prims.convert_element_type.default(v6, torch.{dtype})
    return (v7,)
"""
NO_FINISH = "def finish(n, statistics, rows, whole, syms):\n    return ()\n"


def forward_text() -> str:
    results = ("hit/float32", "pick/float32", "softmax/float32")
    sinks = (Sink("row", 0, None, 1, "float32"), Sink("row", 1, None, 1, "float32"))
    return TileProgram((Projection(0, 0),), FORWARD_TILE, results, FORWARD_FINISH, sinks, (), ()).to_text()


def backward_text(dtype: str) -> str:
    sinks = (
        Sink("contract", 0, 1, V, dtype),
        Sink("outer", 0, 0, V, dtype),
        Sink("outer_t", 0, 0, V, dtype),
        Sink("total", 0, None, V, dtype),
    )
    tile = BACKWARD_TILE.replace("{dtype}", dtype)
    return TileProgram((Projection(0, 0),), tile, (f"wide/{dtype}",), NO_FINISH, sinks, (), ()).to_text()


def inputs(n: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, H, generator=g).to(device, dtype)
    weight = torch.randn(V, H, generator=g).to(device, dtype)
    return hidden, weight, torch.randint(0, V, (n, 1), generator=g).to(device)


def run_both(n: int, dtype: torch.dtype, chunk_bytes: int, mode: str, device: str = "cpu") -> None:
    hidden, weight, labels = inputs(n, dtype, device)
    rows = torch.ops.inductor_grpo.tiles
    logp, lse = rows([hidden, labels], [weight.t()], n, [], forward_text(), chunk_bytes, mode)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
    torch.testing.assert_close(logp.double(), exact.gather(1, labels), **tolerance)
    grad = torch.randn(n, 1, device=device)
    name = str(dtype).removeprefix("torch.")
    arguments = ([hidden, labels, lse, grad], [weight.t(), weight], n, [], backward_text(name), chunk_bytes, mode)
    dx, dw, dwt, db = rows(*arguments)
    hot = torch.zeros_like(exact).scatter_(1, labels, 1.0)
    d = (hot - exact.exp()) * grad.double()
    for ours, wanted in ((dx, d @ weight.double()), (dw, d.t() @ hidden.double()), (db, d.sum(0, keepdim=True))):
        scale = float(wanted.abs().max()) if wanted.numel() else 1.0
        bound = (2e-5 if dtype == torch.float32 else 3e-2) * max(scale, 1.0)
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=bound)
    torch.testing.assert_close(dwt, dw.t().contiguous(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_bytes", [0, 4, 60, 999, 4000])
@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_values(n: int, chunk_bytes: int, dtype: torch.dtype) -> None:
    """One cell a tile, ragged tiles, several row blocks, one tile of everything."""
    run_both(n, dtype, chunk_bytes, "eager")


def test_compiled_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps (full and last tile) each way, whatever the number of rows."""
    monkeypatch.setitem(inductor_grpo.runtime.TILE_COLUMNS, "cpu", 40)
    tiles._STEPS.clear()
    for n in (5, 64, 1, 2, 33):
        run_both(n, torch.float32, 0, "inductor")
    assert sum(len(steps._variants) for steps in tiles._STEPS.values()) == 4
    assert not any(steps._failed for steps in tiles._STEPS.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cuda(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inductor_grpo.runtime.TILE_COLUMNS, "cuda", 40)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for n in (17, 1, 64):
        run_both(n, dtype, 0, "inductor", "cuda")


@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("label", [-1, V, -100])
def test_label_out_of_range(label: int, mode: str) -> None:
    hidden, weight, labels = inputs(6, torch.float32)
    labels[3] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.inductor_grpo.tiles([hidden, labels], [weight.t()], 6, [], forward_text(), 64, mode)


def test_opcheck() -> None:
    hidden, weight, labels = inputs(9, torch.float32)
    torch.library.opcheck(
        torch.ops.inductor_grpo.tiles.default,
        ([hidden, labels], [weight.t()], 9, [], forward_text(), 300, "eager"),
    )
    lse, grad = torch.randn(9, 1), torch.randn(9, 1)
    torch.library.opcheck(
        torch.ops.inductor_grpo.tiles.default,
        ([hidden, labels, lse, grad], [weight.t(), weight], 9, [], backward_text("float32"), 300, "eager"),
    )


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_bad_arguments(mode: str) -> None:
    hidden, weight, labels = inputs(3, torch.float32)
    call = torch.ops.inductor_grpo.tiles
    with pytest.raises(ValueError, match="chunk_bytes"):
        call([hidden, labels], [weight.t()], 3, [], forward_text(), -1, mode)
    with pytest.raises(ValueError, match="codegen"):
        call([hidden, labels], [weight.t()], 3, [], forward_text(), 0, "fast")
