"""Functions of other packages, where one is installed: streamed, equal to eager, and as often as is written here.

``python -m inductor_grpo.tools.peers make DIR`` makes an environment that has them; elsewhere all of this is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_grpo.tools.peers import table
from inductor_grpo.tools.peers.case import Case, all_cases
from inductor_grpo.tools.peers.inputs import HIDDEN, VOCABULARY
from inductor_grpo.tools.peers.judge import Result, compare, judge
from tests import harness

CASES = all_cases()
INSTALLED = [case for case in CASES.values() if case.installed]

# What is not as it should be, and why: packages cut the graph between their logits and what reads them, or are fused.
LEFT: dict[str, tuple[str, ...]] = {
    "rlinf-0.3.0/ppo_entropy_last": ("LOGITS_GIVEN", "LOGITS_RETURNED"),
    "torchrl-0.14.1/entropy": ("LOGITS_GIVEN", "LOGITS_RETURNED"),
}
FAILS_IN_STOCK = {"verl-0.9.1/loss_clip_cov", "liger-kernel-0.8.5/fused_grpo"}

MATMULS: dict[str, int] = {
    "trl-1.16.0/selective": 3,
    "trl-1.16.0/selective_bf16": 3,
    "trl-1.16.0/selective_per_token": 3,
    "trl-1.16.0/selective_row_mask": 3,
    "trl-1.16.0/entropy_bonus": 3,
    "trl-1.16.0/entropy_no_grad": 4,
    "trl-1.16.0/both": 4,
    "trl-1.16.0/both_entropy_detached": 4,
    "trl-1.16.0/trainer_profiled": 5,
    "trl-1.16.0/trainer_grpo": 5,
    "trl-1.16.0/trainer_dapo_entropy": 6,
    "trl-1.16.0/trainer_gspo": 5,
    "trl-1.16.0/trainer_cispo": 5,
    "trl-1.16.0/trainer_vespo": 5,
    "trl-1.16.0/trainer_sapo": 5,
    "trl-1.9.2/trainer_profiled": 5,
    "trl-1.9.2/trainer_grpo": 5,
    "trl-1.9.2/trainer_dapo_entropy": 6,
    "trl-1.9.2/trainer_gspo": 5,
    "trl-1.9.2/trainer_entropy_quantile": 5,
    "trl-1.9.2/trainer_dr_grpo": 5,
    "trl-0.17.0/trainer_profiled_0_17": 4,
    "trl-0.17.0/trainer_grpo_0_17": 4,
    "trl-0.17.0/trainer_bnpo_0_17": 3,
    "verl-0.9.1/loss_vanilla_one_graph": 3,
    "verl-0.9.1/loss_gspo_one_graph": 3,
    "verl-0.9.1/loss_clip_cov_in_python": 4,
    "verl-0.9.1/loss_vanilla": 4,
    "verl-0.9.1/loss_gspo": 4,
    "verl-0.9.1/loss_sapo": 4,
    "verl-0.9.1/loss_gpg": 3,
    "verl-0.9.1/loss_kl_cov": 4,
    "verl-0.9.1/loss_geo_mean": 4,
    "verl-0.9.1/loss_cispo": 4,
    "verl-0.9.1/loss_dppo_tv": 4,
    "verl-0.9.1/loss_dppo_kl": 4,
    "verl-0.9.1/kl_k1": 3,
    "verl-0.9.1/kl_abs": 3,
    "verl-0.9.1/kl_k2": 3,
    "verl-0.9.1/kl_low_var_kl": 3,
    "verl-0.9.1/kl_k1_plus": 3,
    "verl-0.9.1/kl_k3_plus": 3,
    "verl-0.9.1/entropy_bonus": 4,
    "verl-0.9.1/entropy_no_grad_bf16": 3,
    "verl-0.9.1/entropy_chunked": 4,
    "verl-0.9.1/naive_bf16": 3,
    "verl-0.9.1/response": 3,
    "verl-0.9.1/sum_pi_squared": 3,
    "verl-0.9.1/engine_jagged": 3,
    "verl-0.9.1/engine_jagged_entropy": 4,
    "areal-1.0.4/ppo_token": 4,
    "areal-1.0.4/ppo_sequence": 4,
    "areal-1.0.4/ppo_sequence_chunked_bf16": 4,
    "areal-1.0.4/ppo_sequence_padded": 4,
    "areal-1.0.4/ppo_entropy": 4,
    "areal-1.0.4/sapo_sequence": 4,
    "areal-1.0.4/dpo": 4,
    "rlinf-0.3.0/ppo": 4,
    "rlinf-0.3.0/ppo_bf16": 4,
    "rlinf-0.3.0/ppo_entropy_last": 0,
    "rlinf-0.3.0/ppo_entropy_first": 4,
    "rlinf-0.3.0/decoupled": 4,
    "torchrl-0.14.1/positions": 3,
    "torchrl-0.14.1/tokens": 3,
    "torchrl-0.14.1/entropy": 0,
    "torchrl-0.14.1/entropy_written": 3,
    "torchrl-0.14.1/jagged": 4,
    "torchrl-0.14.1/grpo": 4,
    "torchrl-0.14.1/cispo": 3,
    "torchtune-0.6.1/logprobs": 3,
    "torchtune-0.6.1/ppo": 3,
    "torchtune-0.6.1/dpo": 4,
    "liger-kernel-0.8.5/grpo": 3,
    "liger-kernel-0.8.5/gspo": 3,
    "liger-kernel-0.8.5/dr_grpo": 3,
    "liger-kernel-0.8.5/luspo": 3,
    "liger-kernel-0.8.5/vespo": 3,
    "liger-kernel-0.8.5/dpo": 4,
    "liger-kernel-0.8.5/jsd": 4,
}
"""Head-sized products of all regions of a case."""

SEAM: dict[str, int] = {
    "areal-1.0.4/ppo_sequence": 2,
    "areal-1.0.4/ppo_sequence_chunked_bf16": 2,
    "areal-1.0.4/sapo_sequence": 2,
    "areal-1.0.4/dpo": 1,
}
"""Calls that take sums per segment, forward and backward; none in the other cases."""


@pytest.mark.skipif(not INSTALLED, reason="none of the packages is installed")
@pytest.mark.parametrize("case", INSTALLED, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    facts = harness.Graphs(frozenset({VOCABULARY}), frozenset({HIDDEN}))
    with harness.recording(facts):
        result = judge(case)
    if case.name in FAILS_IN_STOCK:
        assert result.error and result.stock, "works now"
        return
    assert not result.error, result.error
    assert result.equal, f"error {result.ours:.2e}, eager's {result.eager:.2e}, ratio {result.ratio:.2f}"
    assert tuple(sorted(text.split()[0] for text in result.left)) == LEFT.get(case.name, ()), result.left
    if case.name not in LEFT:
        assert result.regions and not facts.leftovers, facts.leftovers
    assert result.matmuls == facts.matmuls == MATMULS[case.name], result.regions
    assert len(result.seams) == facts.seam_calls == SEAM.get(case.name, 0)
    assert not result.breaks or case.cure, "a graph break without a word on what to write"


# What needs no package ------------------------------------------------------------------------------------------------


def test_every_case_says_what_it_calls() -> None:
    assert len(CASES) > 60
    for name, case in CASES.items():
        assert name.startswith(f"{case.package}-{case.version}/") and "." in case.function and case.how
    assert set(LEFT) | FAILS_IN_STOCK | set(SEAM) | set(MATMULS) <= set(CASES)
    assert set(CASES) - FAILS_IN_STOCK == set(MATMULS)


def made(wrong: float = 0.0) -> Any:
    """A case of our own: a step and its arguments."""

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = hidden @ weight.T
        factor = 1.0 + wrong if torch.compiler.is_compiling() else 1.0
        return logits.logsumexp(-1).mean() * factor

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, HIDDEN, generator=generator, requires_grad=True)
    return step, (hidden, torch.randn(VOCABULARY, HIDDEN, generator=generator, requires_grad=True))


@pytest.mark.parametrize("wrong", [0.0, 1e-5])
def test_the_judge(wrong: float) -> None:
    result = judge(Case("own/case", "own", "1", "own", "own.case", "", lambda: made(wrong)))
    assert not result.error and result.rewritten and result.matmuls == 3
    assert result.equal == (wrong == 0.0)


def test_the_judge_keeps_an_error_and_asks_stock() -> None:
    def fails() -> Any:
        step, args = made()

        def broken(*args: torch.Tensor) -> torch.Tensor:
            return step(*args).view(7)

        return broken, args

    result = judge(Case("own/case", "own", "1", "own", "own.case", "", fails))
    assert result.error and result.stock and not result.rewritten and not result.equal


def test_compare_knows_each_kind_of_difference() -> None:
    truth, near = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 2.0])
    assert compare([near], [near], [truth], torch.float32)[0]
    for wrong in (near + 1e-4, near.double(), near[:1], torch.tensor([1.0, float("nan")])):
        assert not compare([wrong], [near], [truth], torch.float32)[0]
    assert not compare([], [near], [truth], torch.float32)[0]


def test_the_table() -> None:
    good = Result("a-1/x", "a", "1", "a.f, a.g", "one | two", ["engine, one-pass"], 3, ["one call: 1 total"])
    good.equal, good.cure, good.breaks = True, "write this", ["f.py:1 in f: x (why)"] * 2
    bad = Result("b-2/y", "b", "2", "b.f", "so", error="E: no", stock="E: no")
    assert table.from_json(table.as_json([good, bad])) == [good, bad]
    text, page = table.as_text([good, bad]), table.as_markdown([good, bad])
    assert "engine, one-pass, 3 matmuls" in text and "write      write this" in text and text.count("f.py:1") == 1
    assert "| `a.f`, `a.g` | one / two | engine, one-pass (1) | 3 | one call: 1 total |" in page
    assert "## b 2" in page and "stock `torch.compile` fails as well" in page
    assert page.endswith("2 cases: 1 rewritten, 1 equal to eager, 1 errors")
