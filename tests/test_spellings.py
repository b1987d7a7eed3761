"""Spellings beyond the corpus: each one right and streamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import harness
from tests.corpus.spellings import SPELLINGS, B, H, T, V, ids, normal, padded, pick

# Facts about a spelling that the two first arguments do not tell: vocabulary sizes, and sizes of weights.
VOCABULARIES = {"head_padded_vocabulary": (41, 37), "head_weight_stored_features_first": (41,)}
FEATURES = {
    "head_low_rank_update": (16, 3),
    "head_low_rank_merged": (16, 3),
    "head_bmm_of_an_expanded_weight": (16, 2),  # the batch of weights is the user's own
    "head_two_halves_of_the_vocabulary": (16,),
}


def facts(name: str) -> harness.Graphs:
    return harness.Graphs(frozenset(VOCABULARIES.get(name, (V,))), frozenset(FEATURES.get(name, (H,))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, dtype: torch.dtype) -> None:
    function, make = SPELLINGS[name]
    harness.check(function, make(dtype), facts=facts(name))


@pytest.mark.parametrize("name", ["head_einsum", "advanced_index", "with_z_loss", "kl_to_a_second_head", "unflattened"])
def test_spelling_with_dynamic_shapes(name: str) -> None:
    function, make = SPELLINGS[name]
    harness.check(function, make(torch.float32), facts=facts(name), dynamic=True)


class Model(torch.nn.Module):
    """An embedding, a layer and a head, optionally tied, and a loss; as a user's script has it."""

    def __init__(self, tied: bool, bias: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(V, H)
        self.layer = torch.nn.Linear(H, H)
        self.head = torch.nn.Linear(H, V, bias=bias)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=20 + index, scale=0.4))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.layer(self.embed(tokens))))
        return -pick(logits[:, :-1].float().log_softmax(-1), tokens[:, 1:]).mean()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_module(tied: bool, bias: bool) -> None:
    model = Model(tied, bias)
    names = [name for name, _ in model.named_parameters()]

    def call(tokens: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (tokens,))

    tokens, parameters = ids(B, T), tuple(model.parameters())
    eager, truth = harness.run(call, (tokens, *parameters)), harness.run(call, (tokens, *parameters), wide=True)
    compiled = harness.compiled(model, 5 * V * 4)
    seen = facts("")
    with harness.recording(seen):
        loss = compiled(tokens)
        (loss.double() * 1.25).backward()  # the probe's weight of a scalar
    ours = harness.Run([loss], [None, *(p.grad for p in parameters)])
    assert not harness.problems(ours, eager, truth, harness.floor(parameters))
    harness.assert_streamed(seen)


def test_a_wide_inner_layer_is_no_head() -> None:
    """An MLP whose inner size exceeds its input: only the last product makes logits."""

    def function(h, w, up, down, y):
        inner = F.linear(F.gelu(F.linear(h, up)), down) + h
        return pick(F.linear(inner, w).float().log_softmax(-1), y)

    words = 127
    args = (
        normal(B, T, H, seed=1, grad=True),
        normal(words, H, seed=2, scale=0.4, grad=True),
        normal(4 * H, H, seed=3, scale=0.2, grad=True),
        normal(H, 4 * H, seed=4, scale=0.2, grad=True),
        ids(B, T, high=words),
    )
    harness.check(function, args, facts=harness.Graphs(frozenset({words}), frozenset({H, 4 * H})))


def token_loop(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A logsumexp a token, in a Python loop."""
    sums = torch.stack([torch.logsumexp(row, -1) for row in logits])
    return logits.gather(-1, labels[:, None]).squeeze(-1) - sums


def token_loop_of_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """All of a token's log-probs, in a Python loop."""
    rows = zip(logits, labels, strict=True)
    return torch.stack([F.log_softmax(row, -1).gather(-1, label[None]).squeeze(-1) for row, label in rows])


@pytest.mark.parametrize("log_probs", [token_loop, token_loop_of_log_probs])
def test_a_loop_over_tokens_projects_them_together(log_probs: Any) -> None:
    """Not a matmul of one row a token, neither forward nor backward, however many tokens there are."""

    def function(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return log_probs(h @ w.T, y).exp().mean()

    matmuls = []
    for tokens in (3, 11):
        args = (normal(tokens, H, seed=1, grad=True), normal(V, H, seed=2, scale=0.4, grad=True), ids(tokens))
        torch._dynamo.reset()
        matmuls.append(harness.check(function, args, facts=facts("")).matmuls)
    assert matmuls[0] == matmuls[1] <= 5, matmuls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_edit_in_place_of_a_view_of_a_view_runs_in_one_pass(dtype: torch.dtype) -> None:
    """The last positions of all but the last are divided in place, and then read row by row."""

    def function(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = (h @ w.T)[:, :-1, :][:, -(T - 2) :, :]
        logits.div_(0.7)
        chosen = logits.gather(-1, y[:, -(T - 2) :, None]).squeeze(-1)
        log_probs = chosen - torch.stack([torch.logsumexp(row, -1) for row in logits])
        return (log_probs.exp() * log_probs).mean()

    found = harness.check(function, padded(dtype), facts=facts(""))
    assert found.matmuls == 3, found.reports


def test_edits_in_place_of_parts_that_overlap() -> None:
    """A part that is written twice, by what was written before and by something else, and one beside it."""

    def function(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = h @ w.T
        logits[:, 1:4].mul_(2.0)
        logits[:, 1:4].sub_(0.25)
        logits[:, 2:5].add_(0.5)
        logits[:, 0] = logits[:, 1] * 0.3
        return logits.logsumexp(-1)

    harness.check(function, padded(torch.float32), facts=facts(""))
