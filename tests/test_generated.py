"""Losses through Inductor's code generation: chunk bodies compile, none falls back to eager, values stay right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_grpo import body as bodies
from inductor_grpo.backend import collected
from tests import harness
from tests.corpus.spellings import pick


def inputs(more: int = 0) -> list[torch.Tensor]:
    """Hidden [40, 24], weight [211, 24], labels, and ``more`` further pairs of hidden and weight without gradients."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 24, generator=g), torch.randn(211, 24, generator=g) * 0.3
    others = [torch.randn(n, 24, generator=g) * 0.3 for _ in range(more) for n in (40, 211)]
    return [hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 211, (40,), generator=g), *others]


def entropy_bonus(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logp = F.linear(h, w).log_softmax(-1)
    return (pick(logp, y) - 0.01 * (logp.exp() * logp).sum(-1)).mean()


def full_kl(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor, ref: torch.Tensor, ref_w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        reference = (ref @ ref_w.t()).log_softmax(-1)
    logp = (h @ w.t()).log_softmax(-1)
    return (logp.exp() * (logp - reference)).sum(-1).mean()


def cross_entropy(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(30 * torch.tanh(F.linear(h, w) / 30), y, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [entropy_bonus, full_kl, cross_entropy])
def test_bodies_compile(loss: harness.Function) -> None:
    bodies.clear()
    harness.check(loss, inputs(loss is full_kl), codegen="inductor", rows=16, disable=["tiles"])
    assert bodies.cached()
    assert not any(body.uncompiled for body in bodies.cached())


@pytest.mark.parametrize("schedule", ["one-pass", "tiles"])
def test_code_in_cpp(schedule: str) -> None:
    """Programs reach the operators through C++'s string literals."""
    settings = {"cpp_wrapper": True, "grpo.min_logits_bytes": 0, "grpo.chunk_bytes": 16 * 211 * 4}
    if schedule == "one-pass":
        settings["grpo.disable"] = "tiles"
    call = torch.compile(entropy_bonus, backend="inductor_grpo", options=settings)
    with collected() as reports, torch.set_grad_enabled(schedule == "one-pass"):
        found, known = harness.run(call, inputs()), harness.run(entropy_bonus, inputs())
        exact = harness.run(entropy_bonus, inputs(), wide=True)
    assert any(report.rewrites for report in reports)
    assert not harness.problems(found, known, exact, harness.floor(inputs()))
