"""``grpo.filter_eps``: what is left out, what it may change, and that nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo import config, filter
from tests import harness

N, H, V, EPS = 48, 8, 640, 2.0**-12


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts a chunk, several blocks of columns."""
    monkeypatch.setitem(filter.ROWS, "cpu", 8)
    monkeypatch.setattr(filter, "BLOCK", 64)


def peaked(dtype: torch.dtype = torch.float32, n: int = N, v: int = V) -> list[Tensor]:
    """Hidden states near the embeddings of a few columns, so that a row has few probable ones."""
    g = torch.Generator().manual_seed(0)
    weight = F.normalize(torch.randn(v, H, generator=g), dim=-1)
    near = torch.randint(0, 20, (n,), generator=g) + 40 * (torch.arange(n) // 16)
    hidden = 45 * weight[near] + 0.1 * torch.randn(n, H, generator=g)
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]


LABELS = torch.randint(0, 20, (N,), generator=torch.Generator().manual_seed(1))


def loss(hidden: Tensor, weight: Tensor) -> Tensor:
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    return -(logp.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1) * torch.linspace(-1, 1, N)).mean()


def gradients(function: Any, args: list[Tensor], **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    found = harness.run(harness.compiled(function, 20 * V * 4, **options), args)
    return [g for g in found.gradients if g is not None]


def dlogits(args: list[Tensor]) -> Tensor:
    """Of the loss that the harness takes, in float64."""
    hidden, weight = (a.detach().double() for a in args)
    z = (hidden @ weight.t()).requires_grad_()
    logp = z.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)
    harness.run_backward(harness.probe(-(logp * torch.linspace(-1, 1, N)).mean()))
    assert z.grad is not None
    return z.grad


def test_the_bound_holds_and_work_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kept = peaked(), []
    of = filter.live_parts

    def watched(value: Tensor, eps: float) -> Any:
        parts = of(value, eps)
        for part in parts or [filter.Part(0, value.shape[0], None)]:
            row = torch.zeros(V, dtype=torch.bool)
            row[slice(None) if part.columns is None else part.columns] = True
            kept.extend([row] * (part.stop - part.start))
        return parts

    monkeypatch.setattr(filter, "live_parts", watched)
    plain = gradients(loss, args)
    kept.clear()
    found = gradients(loss, args, filter_eps=EPS)
    lost = ~torch.stack(kept)
    assert lost.shape == (N, V) and 0.5 < lost.float().mean() < 1
    d = dlogits(args)
    least = EPS * d.abs().amax(1, keepdim=True)
    assert (d.abs() < least * (1 + 1e-5))[lost].all()
    hidden, weight = (a.detach().double() for a in args)
    mean = lost.double() @ weight / lost.sum(1, keepdim=True).clamp(min=1)
    spread = torch.stack([(weight[row] - m).abs().sum(0) for row, m in zip(lost, mean)])
    bounds = [least * spread, (lost * least).t() @ hidden.abs()]
    for a, b, bound in zip(found, plain, bounds, strict=True):
        assert not torch.equal(a, b)
        assert ((a - b).double().abs() <= bound + 1e-6 * b.abs().max()).all()


def test_what_is_left_out_is_not_lost() -> None:
    """Many small elements of one sign, and rows of W with a mean: without them the gradient would be far off."""
    value = torch.full((8, V), 2e-4)
    value[:, 3] = -value.sum(1) + 2e-4
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(0)) * 0.1 + 5
    parts, out = filter.live_parts(value, 2.0**-9), torch.empty(8, H)
    assert parts is not None and parts[0].columns is not None and parts[0].columns.tolist() == [3]
    filter.contract(parts, value, weight, out, {})
    right = value.double() @ weight.double()
    assert (out - right).norm() < 1e-5 * (value[:, 3:4].double() @ weight[3:4].double()).norm()


@pytest.mark.parametrize("schedule", ["auto", "two-pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_threshold_is_exact(schedule: str, dtype: torch.dtype) -> None:
    """What is left out then is zero: rows without a gradient, and what underflows."""
    args = peaked(dtype)
    found = harness.run(
        harness.compiled(loss, 20 * V * dtype.itemsize, filter_eps=1e-30, schedule=schedule, disable="tiles"), args
    )
    eager, exact = harness.run(loss, args), harness.run(loss, args, wide=True)
    assert not harness.problems(found, eager, exact, harness.floor(args))


def test_weights_of_both_orders_and_a_bias() -> None:
    def other(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logp = (hidden @ weight + bias).log_softmax(-1)
        return -(logp.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1) * torch.linspace(-1, 1, N)).mean()

    hidden, weight = peaked()
    args = [hidden, weight.detach().t().contiguous().requires_grad_(), torch.zeros(V, requires_grad=True)]
    plain, found = gradients(other, args), gradients(other, args, filter_eps=EPS)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * b.abs().max().item())
    assert torch.equal(found[2], plain[2])


def test_what_is_left_out() -> None:
    """Of 16 rows in two parts: the column of each part's largest elements, an infinity's, none of a zero row."""
    value = torch.full((16, 64), 1e-9)
    value[:8, 20] = 1.0
    value[8:, 5] = torch.linspace(1e-5, 1.0, 8)
    value[3] = 0.0
    value[9, 40], value[10, 63] = torch.nan, torch.inf
    parts = filter.live_parts(value, EPS)
    assert parts is not None
    assert [(p.start, p.stop) for p in parts] == [(0, 8), (8, 16)]
    assert parts[0].columns is not None and parts[0].columns.tolist() == [20]
    assert parts[1].columns is None  # a row whose largest element is a nan is kept, all of it
    assert filter.live_parts(value[:8], 0.0) is None
    assert filter.live_parts(torch.zeros(8, 64), EPS)[0].columns.numel() == 0  # type: ignore[index,union-attr]
    small = filter.live_parts(torch.full((8, 64), 1e-37), 2.0**-60)  # where the threshold underflows
    assert small is None
    value[9, 40] = 0.0
    columns = filter.live_parts(value, EPS)[1].columns  # type: ignore[index]
    assert columns is not None and columns.tolist() == [5, 63]


def test_the_setting() -> None:
    for wrong in (-0.1, 1, True, "much", float("nan")):
        with pytest.raises(ValueError, match="filter_eps"):
            config.current().with_options({"grpo.filter_eps": wrong})
    assert config.current().with_options({"grpo.filter_eps": "0.001"}).filter_eps == 1e-3
    assert config.current().filter_eps == 0


def test_products_of_the_forward_are_not_filtered() -> None:
    """An expected embedding is what the loss computes, not a gradient."""

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logp = F.linear(hidden, weight).log_softmax(-1)
        share = logp.detach().exp()
        return loss(hidden, weight), share @ weight.detach(), share.t() @ hidden.detach()

    args = peaked()
    harness.check(function, args, rows=20, filter_eps=0.0, rewritten=False)
    for eps in (EPS, 0.5):
        outputs = harness.compiled(function, 20 * V * 4, filter_eps=eps)(*args)
        for ours, eager in zip(outputs, function(*args), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
