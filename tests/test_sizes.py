"""Random small sizes, chunk bounds, chains of logits ops and endings, against the accuracy rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import harness

Step = Callable[[Tensor, Tensor], Tensor]

# Each takes the logits [B, T, V] and the labels [B, T].
STEPS: dict[str, Step] = {
    "scale": lambda z, y: z * 0.7,
    "divide": lambda z, y: z / 1.3,
    "softcap": lambda z, y: 3.0 * torch.tanh(z / 3.0),
    "float": lambda z, y: z.float(),
    "bias": lambda z, y: z + torch.linspace(-1, 1, z.shape[-1], dtype=z.dtype),
    "mask": lambda z, y: z.masked_fill(torch.arange(z.shape[-1]) % 3 == 1, -50.0),
    "per_token": lambda z, y: z * (1 + y.unsqueeze(-1).to(z.dtype) / 64),
    "clamp": lambda z, y: z.clamp(-4.0, 4.0),
    "centre": lambda z, y: z - z.mean(-1, keepdim=True),
}


def pick(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy(z: Tensor, y: Tensor) -> Tensor:
    log_probs = z.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


ENDINGS: dict[str, Step] = {
    "gather": lambda z, y: pick(z.log_softmax(-1), y),
    "lse": lambda z, y: pick(z, y) - z.logsumexp(-1),
    "entropy": entropy,
    "cross_entropy": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none"),
    "loss": lambda z, y: (pick(z.log_softmax(-1), y) * torch.cos(y.to(z.dtype))).sum(),
    "z_loss": lambda z, y: z.logsumexp(-1).square(),
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """One random case; ``chunk`` is in rows."""

    batch: int
    time: int
    features: int
    vocabulary: int
    chunk: int
    steps: tuple[str, ...]
    ending: str
    dtype: torch.dtype

    def function(self) -> Callable[..., Any]:
        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(hidden, weight)
            for step in self.steps:
                logits = STEPS[step](logits, labels)
            return ENDINGS[self.ending](logits, labels)

        return loss

    def args(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(7)
        hidden = torch.randn(self.batch, self.time, self.features, generator=generator)
        weight = torch.randn(self.vocabulary, self.features, generator=generator) / self.features**0.5
        labels = torch.randint(0, self.vocabulary, (self.batch, self.time), generator=generator)
        return hidden.to(self.dtype).requires_grad_(), weight.to(self.dtype).requires_grad_(), labels


draws = st.builds(
    Draw,
    batch=st.integers(1, 3),
    time=st.integers(0, 9),
    features=st.sampled_from([1, 2, 3, 8, 13]),
    vocabulary=st.sampled_from([1, 2, 3, 5, 17, 31, 64, 101]),
    chunk=st.integers(1, 11),
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4).map(tuple),
    ending=st.sampled_from(sorted(ENDINGS)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
)


def assert_right(draw: Draw, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    function, args = draw.function(), draw.args()
    eager, truth = harness.run(function, args), harness.run(function, args, wide=True)
    chunk_bytes = draw.chunk * draw.vocabulary * args[1].element_size()
    with harness.collecting() as reports:
        ours = harness.run(harness.compiled(function, chunk_bytes, dynamic=dynamic), args)
    found = harness.problems(ours, eager, truth, harness.floor(args))
    assert not found, "\n".join(found)
    assert "INTERNAL" not in harness.codes(reports), harness.reasons(reports)


# Examples are derived from the test, so that a run in CI is the same run each time.
bounded = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@bounded
@given(draws)
def test_random_static(draw: Draw) -> None:
    assert_right(draw, dynamic=False)


@bounded
@given(draws)
def test_random_dynamic(draw: Draw) -> None:
    assert_right(draw, dynamic=True)


CHUNKED = Draw(2, 9, 8, 101, 1, ("scale", "float"), "gather", torch.float32)


@pytest.mark.parametrize("chunk", [1, 2, 5, 17, 18, 19, 1000])
def test_every_chunk_size_streams_the_same(chunk: int) -> None:
    draw = dataclasses.replace(CHUNKED, chunk=chunk)
    harness.check(draw.function(), draw.args(), rows=chunk)


@pytest.mark.parametrize("step", STEPS)
def test_every_step_streams(step: str) -> None:
    draw = dataclasses.replace(CHUNKED, steps=(step,))
    harness.check(draw.function(), draw.args())


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_streams(ending: str) -> None:
    draw = dataclasses.replace(CHUNKED, ending=ending)
    harness.check(draw.function(), draw.args())


def test_one_compile_serves_many_token_counts() -> None:
    """With dynamic shapes the chunks follow the real count: fewer, equal, more, and none."""
    function = CHUNKED.function()
    call = harness.compiled(function, 5 * 101 * 4, dynamic=True)
    for time in (9, 2, 3, 30, 1, 0):
        args = dataclasses.replace(CHUNKED, time=time).args()
        eager, truth = harness.run(function, args), harness.run(function, args, wide=True)
        assert not harness.problems(harness.run(call, args), eager, truth, harness.floor(args)), time


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_square_logits_stream(dynamic: bool) -> None:
    """As many tokens as words: a size does not say which of the two a dimension is."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return pick(F.linear(hidden, weight).float().log_softmax(-1), labels)

    hidden, weight, labels = Draw(1, 31, 8, 31, 5, (), "gather", torch.float32).args()
    args = (hidden.detach()[0].requires_grad_(), weight, labels[0])
    harness.check(loss, args, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_every_recompile_streams(dynamic: bool | None) -> None:
    """The second compile has a symbol for each tensor's tokens, where the first one had a number or one for all."""
    call = harness.compiled(CHUNKED.function(), 5 * 101 * 4, dynamic=dynamic)
    for time in (9, 12, 1, 5000):
        args = dataclasses.replace(CHUNKED, time=time, batch=1).args()
        facts = harness.graph_facts(args)
        with harness.recording(facts):
            harness.run(call, args)
        if facts.count:
            harness.assert_streamed(facts)
