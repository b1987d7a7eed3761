"""Two hundred steps of training stay where eager's stay: what a step rounds must not add up.

Summing the chunks' weight gradients in bfloat16 is known to bias training within some dozen steps; sums are float32
here, whatever the number of chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS, HIDDEN, VOCABULARY, STEPS = 96, 24, 211, 200


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """A policy loss with an entropy bonus, and the entropy."""
    logp = F.log_softmax(F.linear(hidden, weight).float(), -1)
    picked = logp.gather(-1, labels[:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (-picked * advantages - 1e-3 * entropy).mean(), entropy.detach().mean()


def trained(function: Callable[..., Any], dtype: torch.dtype) -> Tensor:
    """Loss and entropy of each step, ``[STEPS, 2]``: weights kept in float32 or better, and used in ``dtype``."""
    g = torch.Generator().manual_seed(0)
    kept = torch.promote_types(dtype, torch.float32)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=g).to(dtype)
    true = torch.randn(VOCABULARY, HIDDEN, generator=g)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=g) * 0.1).to(kept).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=3e-3)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=g)
        labels = (embedding[tokens].float() @ true.t()).argmax(-1)
        advantages = torch.rand(TOKENS, generator=g).to(kept) + 0.5
        used = weight.to(dtype)
        loss, entropy = function(embedding[tokens], used, labels, advantages)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), entropy.item()])
    return torch.tensor(found, dtype=torch.float64)


known = functools.cache(trained)


@pytest.mark.parametrize("schedule", ["auto", "two-pass"])
def test_loss_and_entropy_of_a_training_run(schedule: str) -> None:
    options = {
        "grpo.codegen": "eager",
        "grpo.min_logits_bytes": 0,
        "grpo.chunk_bytes": 16 * VOCABULARY * 2,
        "grpo.schedule": schedule,
        "grpo.require": True,
    }
    compiled = torch.compile(loss_of, backend="inductor_grpo", options=options)
    truth = known(loss_of, torch.float64)
    eager, ours = known(loss_of, torch.bfloat16), trained(compiled, torch.bfloat16)
    assert truth[-20:, 0].mean() < truth[:20, 0].mean()  # it learns
    for name, column in (("loss", 0), ("entropy", 1)):
        for part in (slice(0, 50), slice(50, 100), slice(100, 150), slice(150, 200)):
            theirs = (eager[part, column] - truth[part, column]).mean().abs()
            own = (ours[part, column] - truth[part, column]).mean().abs()
            size = truth[part, column].abs().mean()
            assert own <= 2 * theirs + 4e-6 * size, (name, part, own, theirs, size)
