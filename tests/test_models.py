"""Whole models of transformers: the model and a naive loss compiled as one function, streamed and right."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import harness, models

SHAPE = models.SHAPES[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", models.ZOO)
def test_training(name: str) -> None:
    """One compilation serves two batch sizes and lengths; three matmuls of the head's size, as in eager."""
    facts = models.check(models.step, models.build(name), [models.batch(shape) for shape in models.SHAPES])
    assert facts.matmuls == 3


def with_the_last_logits(network: Any, data: models.Batch) -> Any:
    """The model makes the logits of the answers alone."""
    inputs = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
    answers = data["completion_mask"].shape[1]
    return models.grpo(network(**inputs, logits_to_keep=answers + 1).logits, data)


def with_its_own_loss(network: Any, data: models.Batch) -> Tensor:
    """``labels=``: the loss that the library computes, and no logits are taken of what it returns."""
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    inputs = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
    return network(**inputs, labels=labels).loss


def in_autocast(network: Any, data: models.Batch) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    return models.grpo(logits, data)


def with_its_loss_checkpointed(network: Any, data: models.Batch) -> Any:
    """Nothing of the head and the loss is kept for the backward."""
    body = network.model(input_ids=data["input_ids"], attention_mask=data["attention_mask"])

    def head_and_loss(hidden: Tensor) -> Any:
        return models.grpo(network.lm_head(hidden), data)

    return checkpoint(head_and_loss, body.last_hidden_state, use_reentrant=False)


@pytest.mark.parametrize("function", [with_the_last_logits, with_its_own_loss])
def test_ways_to_call_a_model(function: models.Step) -> None:
    facts = models.check(function, models.build("granite"), [models.batch(SHAPE)])
    assert facts.matmuls == 3


def test_autocast_with_float32_weights() -> None:
    network = models.build("gemma3", num_hidden_layers=1)
    least = harness.FLOOR[torch.bfloat16]
    facts = models.check(in_autocast, network, [models.batch(SHAPE)], least=least)
    assert facts.matmuls == 3
    assert all(p.dtype == torch.float32 for p in network.parameters())


def test_half_precision() -> None:
    models.check(models.step, models.build("qwen3-tied", torch.bfloat16), [models.batch(SHAPE)])


def test_gradient_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers checkpoints each layer; the head is outside of them.

    Its attention may be wrapped by the package kernels, which sets a variable of its own; in a checkpoint Dynamo traces
    no such write and breaks the graph, with any backend."""
    network = models.build("qwen3", num_hidden_layers=2)
    attention = type(network.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", inspect.unwrap(attention.forward))
    network.gradient_checkpointing_enable({"use_reentrant": False})
    facts = models.check(models.step, network, [models.batch(SHAPE)])
    assert facts.matmuls == 3


def test_the_loss_in_a_checkpoint() -> None:
    facts = models.check(with_its_loss_checkpointed, models.build("qwen3"), [models.batch(SHAPE)])
    assert facts.matmuls == 3


FROZEN: dict[str, tuple[Callable[[Any], Any], int]] = {
    "head": (lambda network: network.lm_head, 2),
    "body": (lambda network: network.model, 2),
}


@pytest.mark.parametrize("part", FROZEN)
def test_a_frozen_part_costs_no_matmul(part: str) -> None:
    network = models.build("phi")
    select, matmuls = FROZEN[part]
    select(network).requires_grad_(False)
    facts = models.check(models.step, network, [models.batch(SHAPE)])
    assert facts.matmuls == matmuls


def test_no_grad() -> None:
    facts = models.check(models.step, models.build("gemma2"), [models.batch(SHAPE)], backward=False)
    assert facts.matmuls == 1


def test_policy_and_reference_in_one_function() -> None:
    """The KL term of a frozen model with a head of its own, which is streamed with the policy's, chunk by chunk."""
    reference = models.build("cohere").requires_grad_(False)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.7)

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.reference = models.build("qwen3"), reference

    def step(networks: Both, data: models.Batch) -> Tensor:
        inputs = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
        with torch.no_grad():
            target = logp_of(networks.reference(**inputs).logits, data)
        logp = logp_of(networks.policy(**inputs).logits, data)
        ratio = torch.exp(logp - data["old_logp"])
        kl = torch.exp(target - logp) - (target - logp) - 1
        mask = data["completion_mask"]
        return ((0.1 * kl - ratio * data["advantages"].unsqueeze(1)) * mask).sum() / mask.sum()

    facts = models.check(step, Both(), [models.batch(SHAPE)], regions=2)
    assert facts.matmuls == 4


def logp_of(logits: Tensor, data: models.Batch) -> Tensor:
    answers = data["completion_mask"].shape[1]
    labels, logits = data["input_ids"][:, -answers:], logits[:, -answers - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# ---------------------------------------------------------------- training


STEPS = 20


def train(loss_of: models.Step, network: Any) -> list[float]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    data = [models.batch(SHAPE, prompt=prompt) for prompt in (4, 4)]
    data[1]["advantages"] = data[1]["advantages"].flip(0)
    for step in range(STEPS):
        loss, *_ = harness.tensors(loss_of(network, data[step % len(data)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sample(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss_of", [with_its_own_loss, models.step])
def test_same_training_as_eager(loss_of: models.Step, tied: bool) -> None:
    expected = train(loss_of, models.build("qwen3", tie_word_embeddings=tied))
    facts = harness.Graphs(frozenset({models.VOCABULARY}), frozenset({models.FEATURES}))
    with harness.recording(facts):
        call = harness.compiled(loss_of, 7 * models.VOCABULARY * 4)
        losses = train(call, models.build("qwen3", tie_word_embeddings=tied))
    # Rounding differs by about 1e-6 a step.  Adam divides by the root of the second moment, so where a gradient is
    # close to 0 a rounding error can move a weight by a whole learning rate: 1e-4 is what 20 such steps allow.
    # A missing or doubled gradient shows as 1e-2 and more within a few steps.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert len({round(loss, 3) for loss in expected}) > STEPS // 2, "nothing was learned, so nothing was compared"
    harness.assert_streamed(facts)
