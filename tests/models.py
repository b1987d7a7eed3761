"""Small causal language models of transformers with random weights, and the accuracy rule for their weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import harness

transformers = pytest.importorskip("transformers")

VOCABULARY, FEATURES = 509, 32
SHAPES = ((2, 23), (3, 17))
"""Batch and answer length of the calls; every size differs."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": FEATURES,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}

ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "num_hidden_layers": 2, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
    ),
    "gemma3": ("Gemma3Text", _GEMMA),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "granite": ("Granite", {"logits_scaling": 2.5, "tie_word_embeddings": True}),
    "phi": ("Phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),  # the head has a bias
}
"""Names of the tests -> the family, and what its config says that others do not."""


def build(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model in training mode, with the same weights each time: large enough ones that the logits differ."""
    family, special = ZOO[name]
    torch.manual_seed(0)
    settings = {"attn_implementation": "sdpa", **_COMMON, **special, **more}
    config = getattr(transformers, f"{family}Config")(**settings)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    head = network.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(10.0)
        if head.bias is not None:
            head.bias.normal_()
    return network.to(dtype)


Batch = dict[str, Tensor]


def batch(shape: tuple[int, int], prompt: int = 4) -> Batch:
    """Prompts and answers of a GRPO step: tokens ``[B, prompt + T]``, the others ``[B, T]`` or ``[B]``."""
    rows, time = shape
    generator = torch.Generator().manual_seed(rows * 100 + time)
    tokens = torch.randint(3, VOCABULARY, (rows, prompt + time), generator=generator)
    mask = torch.ones(rows, time)
    mask[0, time // 2 :] = 0
    attention = torch.cat([torch.ones(rows, prompt), mask], 1).long()
    return {
        "input_ids": tokens,
        "attention_mask": attention,
        "completion_mask": mask,
        "old_logp": torch.randn(rows, time, generator=generator) * 0.1 - 6.0,
        "advantages": torch.randn(rows, generator=generator),
    }


def grpo(logits: Tensor, data: Batch, temperature: float = 0.9) -> tuple[Tensor, Tensor]:
    """The clipped loss and the mean entropy, of ``logits`` ``[B, prompt + T, V]``, written naively."""
    answers = data["completion_mask"].shape[1]
    logits = logits[:, :-1][:, -answers:].float() / temperature
    log_probs = logits.log_softmax(-1)
    logp = log_probs.gather(-1, data["input_ids"][:, -answers:].unsqueeze(-1)).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).detach()
    ratio = torch.exp(logp - data["old_logp"])
    advantages = data["advantages"].unsqueeze(1)
    per_token = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mask = data["completion_mask"]
    return (per_token * mask).sum() / mask.sum(), (entropy * mask).sum() / mask.sum()


def step(network: Any, data: Batch) -> tuple[Tensor, Tensor]:
    """The forward of a training step: one function with the head and the loss in it."""
    logits = network(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    return grpo(logits, data)


# ---------------------------------------------------------------- the rule


Step = Callable[[Any, Batch], Any]


def run(function: Step, network: nn.Module, data: Batch, wide: bool = False, backward: bool = True) -> harness.Run:
    """What ``function`` returns and the gradients of all parameters; ``wide`` takes a copy of the model in float64."""
    if wide:
        network, data = copy.deepcopy(network).double(), harness.fresh(data, wide=True)
    network.zero_grad(set_to_none=True)
    with harness.widened() if wide else contextlib.nullcontext():
        outputs = function(network, data)
        if backward:
            total = harness.probe(outputs)
            assert total is not None, "nothing to differentiate"
            harness.run_backward(total)
    gradients = [parameter.grad for parameter in network.parameters()]
    network.zero_grad(set_to_none=True)
    return harness.Run([out.detach() for out in harness.tensors(outputs)], gradients)


def check(
    function: Step,
    network: nn.Module,
    batches: Sequence[Batch],
    *,
    regions: int = 1,
    graphs: int = 1,
    backward: bool = True,
    features: Sequence[int] = (),
    rows: int = 7,
    least: float = 0.0,
    **more: Any,
) -> harness.Graphs:
    """Runs ``function(network, batch)`` compiled for all ``batches``, and asserts that each is right by the rule, that
    there are exactly ``graphs`` graphs with ``regions`` regions in all, and that nothing vocabulary-sized is left.
    Where there are several, the sizes of the first are marked as dynamic.

    Chunks are ``rows`` rows of float32 logits; of the patterns none is used, so that a region is one call a level."""
    facts = harness.Graphs(frozenset({VOCABULARY}), frozenset({FEATURES, *features}))
    more = {"dynamic": None, "disable": "tiles", **more}
    call = harness.compiled(function, rows * VOCABULARY * 4, **more)
    least = max([least, *(harness.floor(list(network.parameters())), harness.floor(batches))])
    if len(batches) > 1:
        for tensor in batches[0].values():
            torch._dynamo.mark_dynamic(tensor, list(range(tensor.dim())))
    with harness.recording(facts):
        for data in batches:
            with contextlib.nullcontext() if backward else torch.no_grad():
                eager, truth = (run(function, network, data, wide, backward) for wide in (False, True))
                ours = run(call, network, data, backward=backward)
            found = harness.problems(ours, eager, truth, least)
            assert not found, f"{list(data['input_ids'].shape)}: " + "\n".join(found)
            assert not backward or any(g is not None and g.abs().max() > 1e-5 for g in ours.gradients)
    assert "INTERNAL" not in harness.codes(facts.reports), harness.reasons(facts.reports)
    harness.assert_streamed(facts)
    found = f"{facts.count} graphs, {facts.regions} regions, {facts.matmuls} matmuls"
    assert (facts.count, facts.regions) == (graphs, regions), found + harness.reasons(facts.reports)
    return facts
