"""A Hugging Face causal LM with its own loss, compiled as one function: streamed, and training as eager does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import harness

transformers = pytest.importorskip("transformers")

VOCABULARY, FEATURES, BATCH, TIME = 509, 32, 2, 23
STEPS = 20


def model(tied: bool = False) -> Any:
    """A two-layer Qwen3 with random weights, the same each time."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=FEATURES,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (BATCH, TIME), generator=generator) for _ in range(4)]


def own_loss(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``model(labels=...)``: the loss that the library computes."""
    return network(input_ids=tokens, labels=tokens).loss


def policy_loss(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens as RL scripts take them, weighted by the sequence's advantage."""
    logits = network(input_ids=tokens).logits[:, :-1].float() / 0.9
    log_probs = torch.gather(logits.log_softmax(-1), -1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    advantages = torch.tensor([1.0, -0.5])
    return -(log_probs * advantages[:, None]).mean()


def train(loss_of: Any, network: Any) -> list[float]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    data = batches()
    for step in range(STEPS):
        loss = loss_of(network, data[step % len(data)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss_of", [own_loss, policy_loss])
def test_same_training_as_eager(loss_of: Any, tied: bool) -> None:
    expected = train(loss_of, model(tied))
    facts = harness.Graphs(frozenset({VOCABULARY}), frozenset({FEATURES}))
    chunk_bytes = 7 * VOCABULARY * 4
    with harness.recording(facts):
        losses = train(harness.compiled(loss_of, chunk_bytes), model(tied))
    # Rounding differs by about 1e-6 a step.  Adam divides by the root of the second moment, so where a gradient is
    # close to 0 a rounding error can move a weight by a whole learning rate: 1e-4 is what 20 such steps allow.
    # A missing or doubled gradient shows as 1e-2 and more within a few steps.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert len({round(loss, 3) for loss in expected}) > STEPS // 2, "nothing was learned, so nothing was compared"
    harness.assert_streamed(facts)


def test_under_no_grad() -> None:
    network, tokens = model(), batches()[0]
    facts = harness.Graphs(frozenset({VOCABULARY}), frozenset({FEATURES}))
    with torch.no_grad():
        expected = policy_loss(network, tokens)
        with harness.recording(facts):
            loss = harness.compiled(policy_loss, 7 * VOCABULARY * 4)(network, tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    harness.assert_streamed(facts)
