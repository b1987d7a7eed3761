"""Public bug reports of fused and chunked losses, each reduced to a small input: what failed there is right here.

The spelling is the plain one that the fused code of each report stood for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import harness

B, T, H, V = 3, 7, 16, 41
N = B * T


def inputs(shape: tuple[int, ...] = (N,), dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """hidden ``[*shape, H]``, weight ``[V, H]``, labels, a second set of values and a mask, one a token."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, H, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=dtype).requires_grad_()
    labels = torch.randint(V, shape, generator=g)
    old = torch.randn(shape, generator=g) - 4
    mask = (torch.rand(shape, generator=g) > 0.3).float()
    return hidden, weight, labels, old, mask


def selected(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def streamed(function: Callable[..., Any], args: Any, matmuls: int = 3, **more: Any) -> harness.Graphs:
    """Right by the rule, in chunks of 5 rows, and no vocabulary-sized tensor is left."""
    facts = harness.check(function, args, **more)
    assert facts.matmuls == matmuls and not facts.leftovers, (facts.matmuls, harness.reasons(facts.reports))
    return facts


# ---------------------------------------------------------------- ignored labels


def ignoring(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor, reduction: str) -> Tensor:
    labels = torch.where(mask.bool(), labels, -100)
    loss = F.cross_entropy(hidden @ weight.t(), labels, reduction=reduction)
    return loss if reduction != "none" else (loss * old).sum()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_add_nothing(reduction: str) -> None:
    """A compiled fused cross entropy added what its buffer held for ignored rows.

    https://github.com/linkedin/Liger-Kernel/pull/1338
    """
    streamed(lambda *args: ignoring(*args, reduction=reduction), inputs())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_rows_add_nothing_without_gradients(reduction: str) -> None:
    """As reported: under no_grad."""

    @torch.no_grad()
    def function(*args: Tensor) -> Tensor:
        return ignoring(*args, reduction=reduction)  # type: ignore[misc]

    streamed(function, inputs(), matmuls=1)


# ---------------------------------------------------------------- loops over chunks, written by hand


def test_a_loop_over_the_sequence_keeps_no_chunk() -> None:
    """Chunks of log-softmax under plain autograd bound nothing: all of them live until the backward.

    https://github.com/NVIDIA-NeMo/RL/pull/4222
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        parts = [selected(logits[:, s : s + 3], labels[:, s : s + 3]) for s in range(0, T, 3)]
        return ((torch.cat(parts, dim=1) - old).exp() * mask).sum()

    streamed(function, inputs((B, T)))


def test_chunks_joined_before_the_gather() -> None:
    """Chunks of the whole distribution were concatenated, and gathered from afterwards.

    https://github.com/NVIDIA-NeMo/RL/pull/3124
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        chunks = [chunk.float().log_softmax(-1) for chunk in F.linear(hidden, weight).split(3, dim=1)]
        logp = torch.cat(chunks, dim=1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return ((logp - old).exp() * mask).sum()

    streamed(function, inputs((B, T)))


# ---------------------------------------------------------------- sequence ratios


def test_a_loss_of_one_column_times_a_mask() -> None:
    """A ratio per sequence ``[B, 1]`` is spread over the tokens by the mask that it is multiplied with.

    https://github.com/huggingface/trl/issues/3823
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor, adv: Tensor) -> Tensor:
        ratio = selected(F.linear(hidden, weight), labels) - old
        ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1).exp()
        loss = -torch.min(ratio * adv.unsqueeze(1), ratio.clamp(0.8, 1.2) * adv.unsqueeze(1))
        return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()

    streamed(function, (*inputs((B, T)), torch.tensor([1.0, -0.5, 0.3])), rows=T)


# ---------------------------------------------------------------- devices


def test_moves_between_equal_devices() -> None:
    """Hidden states go to the head's device, log-probs come back: of one device these moves are nothing.

    https://github.com/unslothai/unsloth-zoo/pull/1027
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        logits = hidden.to(weight.device).to(weight.dtype) @ weight.t()
        logp = selected(logits, labels.to(logits.device)).to(hidden.device)
        return ((logp - old).exp() * mask).sum()

    streamed(function, inputs())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_head_is_on_another_device() -> None:
    """The reported failure: hidden states on one device, the head on another."""

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        logits = hidden.to(weight.device) @ weight.t()
        return ((selected(logits, labels.to(logits.device)).to(hidden.device) - old).exp() * mask).sum()

    hidden, weight, *rest = inputs()
    # The loss is on the first device, so every log-prob goes there and its gradient comes back: two passes.
    streamed(function, (hidden, weight.detach().cuda().requires_grad_(), *rest), matmuls=4)


# ---------------------------------------------------------------- entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_has_a_gradient(temperature: float) -> None:
    """A chunked function returned log-probs and entropy, and dropped the entropy's gradient.

    https://github.com/huggingface/trl/pull/6625
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        logp = (F.linear(hidden, weight).float() / temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (picked * old * mask - 0.3 * entropy * mask).sum()

    streamed(function, inputs())


def test_probabilities_changed_in_place() -> None:
    """Entropy by ``probs.mul_(logp)``, as a metric: in eager its backward would find the product in exp's place.

    https://github.com/huggingface/trl/pull/7125
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight)
        with torch.no_grad():
            logp = logits.float().log_softmax(-1)
            entropy = logp.exp().mul_(logp).sum(-1).neg_()
        return ((selected(logits, labels) - old).exp() * mask).sum(), (entropy * mask).sum() / mask.sum()

    streamed(function, inputs())


# ---------------------------------------------------------------- rows chosen before the head


def test_rows_chosen_by_a_mask() -> None:
    """Only the completion's tokens reach the head: their number is data.

    https://github.com/huggingface/trl/pull/7075
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        chosen = mask.bool()
        return (selected(F.linear(hidden[chosen], weight), labels[chosen]) - old[chosen]).exp().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        streamed(function, inputs((B, T)), fullgraph=True)


def test_rows_chosen_by_a_mask_without_that_setting() -> None:
    """Dynamo breaks the graph at each choice, between head and loss too: the report names line and setting."""

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        chosen = mask.bool()
        return (selected(F.linear(hidden[chosen], weight), labels[chosen]) - old[chosen]).exp().sum()

    facts = harness.check(function, inputs((B, T)), rewritten=False)
    line = function.__code__.co_firstlineno + 2
    assert f"test_public_reports.py:{line}" in harness.reasons(facts.reports)
    assert "capture_dynamic_output_shape_ops = True" in harness.reasons(facts.reports)


# ---------------------------------------------------------------- truncated distributions


@pytest.mark.parametrize("kind", ["top-k", "min-p"])
def test_log_probs_of_a_truncated_distribution(kind: str) -> None:
    """The sampler's log-probs are of the tokens that survive truncation, and so must the trainer's be.

    https://github.com/huggingface/trl/issues/6789
    """

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        if kind == "top-k":
            least = logits.topk(11, dim=-1).values[..., -1:]
        else:
            least = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(0.02))
        own = F.one_hot(labels, V).bool()
        logits = logits.masked_fill((logits < least) & ~own, float("-inf"))
        return ((selected(logits, labels) - old).exp() * mask).sum()

    streamed(function, inputs())


def test_nucleus() -> None:
    """Top-p sorts each row: right, and streamed or left with a reason."""

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        ordered, order = logits.sort(dim=-1, descending=True)
        reached = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > 0.9
        dropped = torch.zeros_like(reached).scatter(-1, order, reached) & ~F.one_hot(labels, V).bool()
        return ((selected(logits.masked_fill(dropped, float("-inf")), labels) - old).exp() * mask).sum()

    facts = harness.check(function, inputs(), rewritten=False)
    assert facts.regions or harness.codes(facts.reports), "left without a reason"


# ---------------------------------------------------------------- numbers of the host


def test_bounds_that_change_are_not_stale() -> None:
    """Inductor kept the bound of a clamp that Dynamo had made symbolic; each closure compiled anew got the old one.

    https://github.com/pytorch/pytorch/issues/194976
    """
    hidden, weight, labels, old, mask = inputs()

    def function(bound: float) -> Tensor:
        ratio = (selected(F.linear(hidden, weight), labels) - old).exp()
        return (ratio.clamp(max=1.0 + bound) * mask).sum()

    bounds = (0.1, 0.2, 0.7, 1.5, 0.2)
    for bound in bounds:
        closure = functools.partial(function, bound)
        torch.testing.assert_close(harness.compiled(closure, 5 * V * 4, dynamic=None)(), closure())
    call = harness.compiled(function, 5 * V * 4, dynamic=None)
    for bound in bounds:
        torch.testing.assert_close(call(bound), function(bound))
