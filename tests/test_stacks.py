"""Distributions stacked along a new dimension and reduced over it: mixtures, votes, bounds of several heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import harness
from tests.corpus.spellings import H, T, V, ids, normal


def log_probs(h: Tensor, w: Tensor) -> Tensor:
    return (h @ w.T).float().log_softmax(-1)


def jensen_shannon(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """The mixture as a logsumexp over the stack, in front."""
    p, q = log_probs(h, w), log_probs(teacher, head)
    mixed = torch.logsumexp(torch.stack([p + math.log(0.3), q + math.log(0.7)]), dim=0)
    first = F.kl_div(mixed, p, reduction="none", log_target=True).sum(-1)
    return (0.3 * first + 0.7 * F.kl_div(mixed, q, reduction="none", log_target=True).sum(-1)).mean()


def mixture_of_probs(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """Probabilities added up, stacked behind the rows."""
    mixed = torch.stack([log_probs(h, w).exp(), log_probs(teacher, head).exp()], 1).sum(1).log()
    return -mixed.gather(-1, y[:, None]).squeeze(-1)


def best_of_three(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """The largest logit of three, stacked behind the vocabulary."""
    a, b = h @ w.T, teacher @ head.T
    return F.cross_entropy(torch.stack([a, b, (a + b) / 2], -1).amax(-1), y, reduction="none")


def best_of_three_with_ties(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """Ties share the gradient: the backward counts them, which is a sum of booleans."""
    a, b = h @ w.T, teacher @ head.T
    return F.cross_entropy(torch.stack([a, a, b]).amax(0), y, reduction="none")


def votes(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """Booleans added up are a number."""
    p, q = log_probs(h, w), log_probs(teacher, head)
    return (torch.stack([p > -3, q > -3, p > -4]).sum(0) * p).sum(-1)


def votes_of_bytes(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """The sum of bytes is larger than a byte."""
    p, q = log_probs(h, w), log_probs(teacher, head)
    return (torch.stack([(p > -3).to(torch.uint8) * 200, (q > -3).to(torch.uint8) * 200]).sum(0) * p).sum(-1)


def arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    """hidden [T,H], weight [V,H], the same of a second head without gradients, labels [T]."""
    return (
        normal(T, H, seed=1, grad=True, dtype=dtype),
        normal(V, H, seed=2, scale=0.4, grad=True, dtype=dtype),
        normal(T, H, seed=5, dtype=dtype),
        normal(V, H, seed=6, scale=0.4, dtype=dtype),
        ids(T),
    )


FUNCTIONS = [jensen_shannon, mixture_of_probs, best_of_three, best_of_three_with_ties, votes, votes_of_bytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_stack(function: Callable[..., Any], dtype: torch.dtype) -> None:
    harness.check(function, arguments(dtype))


def test_stack_with_dynamic_shapes() -> None:
    harness.check(jensen_shannon, arguments(torch.float32), dynamic=True)


def test_a_stack_that_something_else_reads_is_left_alone() -> None:
    def running(h: Tensor, w: Tensor, teacher: Tensor, head: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([log_probs(h, w), log_probs(teacher, head)])
        return stacked.logsumexp(0).mean() + stacked.cumsum(0).mean()

    facts = harness.check(running, arguments(torch.float32), rewritten=False)
    assert facts.regions == 0 and "MIXES_ROWS" in harness.codes(facts.reports)
