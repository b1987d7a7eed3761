"""Losses that need the values of all rows first: in one pass where the logits of all rows are one chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo import runtime
from tests import harness
from tests.test_one_pass import DTYPES, N, V, clipped, in_one_pass, inputs, log_probs, schedules

ALL = 1000
"""Rows of a chunk, more than there are."""


def args_of(dtype: torch.dtype = torch.float32) -> list[Any]:
    """Hidden, weight, labels, old log-probs, advantages and mask of a packed batch, and each token's segment."""
    ids = torch.tensor([0] * 9 + [1] * 2 + [3] * (N - 11))
    return [*inputs(dtype, padded=False).values(), ids, 4]


def packed(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """GSPO: a ratio for each segment, of the mean over its tokens."""
    difference = (log_probs(hidden, weight, labels) - old) * mask
    tokens = mask.new_zeros(count).index_add_(0, ids, mask).clamp(min=1)
    ratio = torch.exp(difference.new_zeros(count).index_add_(0, ids, difference) / tokens)[ids]
    return (clipped(ratio, adv) * mask).sum() / mask.sum()


def with_entropy(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """A part of the gradient needs no other row."""
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    sums = picked.new_zeros(count).index_add_(0, ids, (picked - old) * mask)
    return (clipped(torch.exp(sums[ids] / 9), adv) * mask - 0.01 * entropy).mean()


def of_the_mean(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    return torch.exp(-log_probs(hidden, weight, labels).mean())


def whitened(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """Rewards of a penalty on the model's own log-probs, less their mean over the batch."""
    logp = log_probs(hidden, weight, labels)
    reward = adv - 0.1 * (logp - old)
    reward = (reward - reward.mean()) / (reward.std() + 1e-4)
    return -(torch.exp(logp - old) * reward * mask).sum() / mask.sum()


def with_bias(hidden, weight, labels, old, adv, mask, ids, count, bias):  # type: ignore[no-untyped-def]
    logp = F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.exp(-(logp * mask).mean())


LOSSES: dict[str, Callable[..., Any]] = {f.__name__: f for f in (packed, with_entropy, of_the_mean, whitened)}


@pytest.mark.sample(2, only="dynamic")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: str, dynamic: bool) -> None:
    args = args_of(DTYPES[dtype])
    facts = in_one_pass(LOSSES[name], args, rows=ALL, dynamic=dynamic, rewritten=False)
    assert schedules(facts)[0] == "one-pass, logits kept"
    assert not any(report.rejections for report in facts.reports)


@pytest.mark.parametrize("name", LOSSES)
def test_more_rows_than_a_chunk_take_two_passes(name: str) -> None:
    facts = harness.check(LOSSES[name], args_of(), rows=8)
    assert schedules(facts)[0].startswith("two-pass")
    assert facts.matmuls == 4
    assert schedules(harness.check(LOSSES[name], args_of(), rows=ALL, schedule="two-pass"))[0].startswith("two-pass")


def test_a_bias_and_frozen_inputs() -> None:
    args = [*args_of(), torch.randn(V).requires_grad_()]
    in_one_pass(with_bias, args, rows=ALL, rewritten=False)
    args[0].requires_grad_(False)
    in_one_pass(with_bias, args, rows=ALL, matmuls=2, rewritten=False)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the buffers of logits and of the products that make them."""
    made: list[tuple[int, ...]] = []
    empty, mm = torch.empty, torch.mm

    def allocate(*size: Any, **more: Any) -> Tensor:
        wide = isinstance(size[0], tuple) and len(size[0]) == 2 and size[0][1] == V and type(size[0][0]) is int
        made.extend([("empty", *size[0])] if wide else [])
        return empty(*size, **more)

    def multiply(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        made.extend([("mm", a.shape[0], V)] if b.shape[1] == V else [])
        return mm(a, b, **more)

    monkeypatch.setattr(runtime.torch, "empty", allocate)
    monkeypatch.setattr(runtime.torch, "mm", multiply)
    return made


def test_one_buffer_and_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is written over the logits."""
    args = args_of()
    call = harness.compiled(packed, ALL * V * 4)
    call(*args)
    made = watched(monkeypatch)
    call(*args).backward()
    assert made == [("empty", N, V), ("mm", N, V)]


def test_more_rows_in_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for all sizes keeps nothing where the logits are more than a chunk."""
    call = harness.compiled(packed, 30 * V * 4, dynamic=True)
    for rows in (11, N, 30, 31, 80):
        args = args_of()
        for place in (0, 2, 3, 4, 5, 6):
            some = torch.cat([args[place].detach()] * 4)[:rows]
            args[place] = some.requires_grad_(args[place].requires_grad)
        eager, exact = harness.run(packed, args), harness.run(packed, args, wide=True)
        with monkeypatch.context() as patch:
            made = watched(patch)
            found = harness.run(call, args)
        assert not harness.problems(found, eager, exact, harness.floor(args)), rows
        largest = max(size[1] for size in made if size[0] == "empty")
        assert largest == rows if rows <= 30 else largest <= 30, (rows, made)


def test_a_second_backward_and_no_backward() -> None:
    args = args_of()
    call = harness.compiled(packed, ALL * V * 4)
    loss = call(*args)
    first = torch.autograd.grad(loss, args[:2], retain_graph=True)
    again = torch.autograd.grad(loss, args[:2])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(call(*args), packed(*args))


@pytest.mark.parametrize("setting", [{"activation_memory_budget": 0.1}, {"aggressive_recomputation": True}])
def test_a_partitioner_that_recomputes_anything_gets_copies(setting: dict[str, Any]) -> None:
    """What is written over must not be read again in the backward."""
    with functorch_config.patch(setting):
        facts = harness.check(packed, args_of(), rows=ALL, rewritten=False)
    assert "logits kept" in schedules(facts)[0]
    assert facts.matmuls == 4  # counted as if the rows beyond those that are kept were many


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_generated_code(dynamic: bool) -> None:
    in_one_pass(packed, args_of(), rows=ALL, codegen="inductor", dynamic=dynamic, rewritten=False)


def with_a_scale_of_all(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """Three readings of the logits, with values of all rows between each."""
    logits = F.linear(hidden, weight)
    logp = (logits / logits.amax(-1).mean()).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.exp(-(logp * mask).mean())


def with_an_expectation(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """The program that keeps the logits has a product of its own."""
    logp = F.linear(hidden, weight).log_softmax(-1)
    mixed = logp.detach().exp() @ weight.detach().square()
    picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.exp(-(picked * mixed.mean(-1)).mean())


def a_row_at_a_time(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """The same without values of all rows."""
    logp = F.linear(hidden, weight).log_softmax(-1)
    mixed = logp.detach().exp() @ weight.detach().square()
    return -(logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * mixed.mean(-1)).mean()


@pytest.mark.parametrize("rows", [ALL, 5])
@pytest.mark.parametrize("keep_bytes", [0, 4 * V * 7, 2**20])
@pytest.mark.parametrize("loss", [with_a_scale_of_all, with_an_expectation, a_row_at_a_time])
def test_kept_logits_are_written_by_nobody_else(loss: Callable[..., Any], keep_bytes: int, rows: int) -> None:
    harness.check(loss, args_of(), rows=rows, keep_bytes=keep_bytes, rewritten=False)
