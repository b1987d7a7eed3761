"""LoRA of peft on models of transformers, on the head too: the adapter's terms are streamed with the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import harness, models

peft = pytest.importorskip("peft")

RANK = 4
SHAPES = models.SHAPES


def adapted(name: str, targets: list[str], **more: Any) -> Any:
    """A model whose adapters do something from the start; the rest of it is frozen."""
    settings = {"r": RANK, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": targets, "task_type": "CAUSAL_LM"}
    network = peft.get_peft_model(models.build(name), peft.LoraConfig(**{**settings, **more})).train()
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            if "lora_B" in key or "lora_embedding_A" in key:
                parameter.normal_(std=0.1)
    return network


def test_adapters_in_the_body() -> None:
    """The head is frozen: its gradient is not computed."""
    network = adapted("qwen3", ["q_proj", "v_proj"])
    facts = models.check(models.step, network, [models.batch(shape) for shape in SHAPES], features=[RANK])
    assert facts.matmuls == 2


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_an_adapter_on_the_head(name: str) -> None:
    network = adapted(name, ["q_proj", "lm_head"])
    facts = models.check(models.step, network, [models.batch(shape) for shape in SHAPES], features=[RANK])
    assert facts.matmuls == 2 + 3  # three of the adapter's rank: its logits and two gradients


def test_dropout_of_an_adapter_is_before_the_head() -> None:
    """It draws other numbers than eager does, so only what is left is looked at."""
    network = adapted("qwen3", ["lm_head"], lora_dropout=0.5)
    facts = harness.Graphs(frozenset({models.VOCABULARY}), frozenset({models.FEATURES, RANK}))
    with harness.recording(facts):
        ours = models.run(harness.compiled(models.step, 7 * models.VOCABULARY * 4), network, models.batch(SHAPES[0]))
    assert all(gradient.isfinite().all() for gradient in ours.gradients if gradient is not None)
    harness.assert_streamed(facts)


def test_a_head_that_is_trained_and_saved() -> None:
    network = adapted("qwen3", ["q_proj"], modules_to_save=["lm_head"])
    facts = models.check(models.step, network, [models.batch(SHAPES[0])], features=[RANK])
    assert facts.matmuls == 3


def test_the_reference_is_the_model_without_its_adapters() -> None:
    network = adapted("qwen3", ["q_proj", "lm_head"])
    with network.disable_adapter():
        models.check(models.step, network, [models.batch(SHAPES[0])], features=[RANK], backward=False)


def test_several_adapters() -> None:
    network = adapted("qwen3", ["lm_head"])
    network.add_adapter("second", peft.LoraConfig(r=RANK, target_modules=["lm_head"], lora_alpha=2))
    network.set_adapter("second")
    models.check(models.step, network, [models.batch(SHAPES[0])], features=[RANK])
