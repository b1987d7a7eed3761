"""The demo: both runs agree, the logits are gone, and its way of measuring sees what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inductor_grpo
from inductor_grpo.tools import demo

ROOT = str(Path(inductor_grpo.__file__).parents[1])

# 512 tokens x 4096 entries: the logits (8 MiB) are by far the largest tensor, the next are of 2 MiB.
SMALL = ["--steps", "2", "--vocab", "4096", "--prompts", "8", "--group", "8", "--warmup", "10"]
OPTIONS = [
    "grpo.codegen=eager",
    f"grpo.min_logits_bytes={4 << 20}",
    f"grpo.chunk_bytes={1 << 20}",
    "grpo.require=false",
]


def run(*more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])}
    options = [part for option in OPTIONS for part in ("--option", option)]
    command = [sys.executable, "-m", "inductor_grpo.tools.demo", *SMALL, *options, *more]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_both_runs_agree_and_the_logits_are_gone() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    eager, ours = data["eager"], data["compiled"]
    assert [s["step"] for s in ours["steps"]] == [s["step"] for s in eager["steps"]] == [0, 1]
    assert data["same_rollouts"] == 2
    assert data["largest_loss_difference"] < 1e-5
    assert [s["reward"] for s in ours["steps"]] == [s["reward"] for s in eager["steps"]]
    assert data["logits_bytes"] == 512 * 4096 * 4
    assert eager["largest_allocation"] == data["logits_bytes"]
    assert ours["largest_allocation"] <= data["logits_bytes"] // 4
    assert ours["allocated_peak"] < eager["allocated_peak"] - data["logits_bytes"]
    assert len(ours["report"]["rewrites"]) == 1
    assert "logits = model.lm_head(hidden).float()" in ours["report_text"]


def test_a_backend_that_fails_is_reported_with_its_error() -> None:
    done = run("--backend", "no_such_backend")
    assert done.returncode == 1
    assert "the compiled run failed" in done.stderr and "no_such_backend" in done.stderr


def test_summary_says_when_the_logits_are_still_there() -> None:
    setup = demo.Setup(steps=1, backend="inductor")
    step = {"step": 0, "loss": 0.5, "reward": 0.25, "rollouts": "a"}
    size = setup.tokens * setup.vocab * 4
    end = {"largest_allocation": size, "allocated_peak": 3 * size, "peak_resident": 4 * size}
    end |= {"update_seconds": 1.0, "first_update_seconds": 2.0}
    text = demo.summary(demo.summarise(setup, [step, end], [step, end]))
    assert "STILL THERE" in text
    assert "0.250 -> 0.250" in text and "1 of 1 steps" in text
    gone = demo.summary(demo.summarise(setup, [step, end], [step, {**end, "largest_allocation": 1}]))
    assert "no tensor of that size" in gone


def test_checker_ends_an_answer_at_its_first_wrong_total() -> None:
    totals = torch.arange(1, demo.NUMBERS + 1).expand(3, -1)
    answers = totals.clone()
    answers[1, 2] = 0
    answers[2, 0] = 0
    prompts = torch.zeros(3, demo.NUMBERS + 1, dtype=torch.long)
    rewards, mask = demo.check(torch.cat([prompts, answers], 1), totals)
    assert rewards.tolist() == [1.0, 0.25, 0.0]
    assert mask.sum(1).tolist() == [8.0, 3.0, 1.0]


def test_advantages_are_normalised_within_a_group() -> None:
    advantages = demo.group_advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), group=2)
    assert advantages[0] < 0 < advantages[1]
    assert advantages.view(2, 2).sum(1).tolist() == pytest.approx([0.0, 0.0])
    assert advantages[2:].tolist() == [0.0, 0.0]


def test_allocations_sees_the_largest_tensor_and_the_peak() -> None:
    def step() -> None:
        a = torch.ones(1 << 20)
        b = a + 1
        del a
        (b * 2).sum()

    largest, together = demo.allocations(step)
    assert largest == 4 << 20
    assert 8 << 20 <= together < 9 << 20


def test_rollouts_repeat() -> None:
    setup = demo.Setup(vocab=256)
    torch.manual_seed(0)
    model = demo.Model(setup)
    prompts, _ = demo.problems(setup, 4, torch.Generator().manual_seed(1))
    first, second = (demo.rollout(model, prompts, torch.Generator().manual_seed(2)) for _ in range(2))
    other, _ = demo.rollout(model, prompts, torch.Generator().manual_seed(3))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], other)
    assert first[0].shape == (4, 2 * demo.NUMBERS + 1) and first[1].shape == (4, demo.NUMBERS)
