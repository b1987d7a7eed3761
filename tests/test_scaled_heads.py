"""Heads whose logits are scaled or capped as a whole before the loss takes its rows of them, as models do: rows that
the loss does not read are never projected, and one pass is three matmuls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import harness

BATCH, TIME, FEATURES, VOCABULARY = 3, 11, 8, 37


def scale(logits: Tensor) -> Tensor:
    return logits * 0.5


def divide(logits: Tensor) -> Tensor:
    return logits / 2.5


def negate(logits: Tensor) -> Tensor:
    return -logits


def soft_cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 3.0) * 3.0


def soft_cap_and_scale(logits: Tensor) -> Tensor:
    return soft_cap(logits) * 0.5 / 0.9


def forbid_words(logits: Tensor) -> Tensor:
    words = torch.arange(VOCABULARY) % 5 == 4
    return logits.masked_fill(words, -30.0)


def weigh_words(logits: Tensor) -> Tensor:
    return logits * torch.linspace(0.5, 1.5, VOCABULARY)


def square(logits: Tensor) -> Tensor:
    return logits * logits / 8


def cast(logits: Tensor) -> Tensor:
    return (logits.to(torch.bfloat16) * 0.75).float()


def loss_of(change: Callable[[Tensor], Tensor], take: Callable[[Tensor], Tensor] | None = None) -> harness.Function:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = change(hidden @ weight.t())
        logits = logits[:, :-1][:, -7:] if take is None else take(logits)
        logp = logits.log_softmax(-1).gather(-1, labels[:, -logits.shape[1] :].unsqueeze(-1)).squeeze(-1)
        return (logp * logp.detach().exp()).mean()

    return loss


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden = torch.randn(BATCH, TIME, FEATURES).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, FEATURES).to(dtype).requires_grad_()
    return [hidden, weight, torch.randint(VOCABULARY, (BATCH, TIME))]


CHANGES = [scale, divide, negate, soft_cap, soft_cap_and_scale, forbid_words, weigh_words, square, cast]


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_nobody_reads_are_not_projected(change: Callable[[Tensor], Tensor]) -> None:
    facts = harness.check(loss_of(change), inputs(), disable="tiles")
    assert (facts.matmuls, facts.regions) == (3, 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("schedule, matmuls, regions", [("auto", 3, 1), ("two-pass", 4, 2)])
def test_schedules_and_shapes(schedule: str, matmuls: int, regions: int, dynamic: bool) -> None:
    facts = harness.check(loss_of(soft_cap_and_scale), inputs(), schedule=schedule, disable="tiles", dynamic=dynamic)
    assert (facts.matmuls, facts.regions) == (matmuls, regions)


@pytest.mark.parametrize("change", [scale, soft_cap, cast])
def test_half_precision(change: Callable[[Tensor], Tensor]) -> None:
    facts = harness.check(loss_of(change), inputs(torch.bfloat16), disable="tiles")
    assert facts.matmuls == 3


def two_windows(logits: Tensor) -> Tensor:
    return torch.cat([logits[:, 1:5], logits[:, 6:9]], 1)


def overlapping(logits: Tensor) -> Tensor:
    return logits[:, 1:8] + 0.25 * logits[:, 3:10]


def picked(logits: Tensor) -> Tensor:
    return logits[:, torch.tensor([7, 2, 2, 5])]


@pytest.mark.parametrize("take", [two_windows, overlapping, picked])
@pytest.mark.parametrize("change", [soft_cap, cast])
def test_other_selections(change: Callable[[Tensor], Tensor], take: Callable[[Tensor], Tensor]) -> None:
    harness.check(loss_of(change, take), inputs(), disable="tiles")


@pytest.mark.parametrize("least", [0.5, 0.0])
def test_a_factor_a_row_keeps_what_is_not_finite(least: float) -> None:
    """A temperature of 0 in a row that the loss does not read makes its gradient nan, as in eager."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
        return loss_of(lambda logits: logits / temperature)(hidden, weight, labels)

    temperature = torch.rand(BATCH, TIME, 1) + 0.5
    temperature[0, 1] = least
    args = [*inputs(), temperature]
    assert harness.run(loss, args).gradients[1].isnan().all() == (least == 0)
    harness.check(loss, args)
