"""GRPOTrainer of trl with log-probabilities written naively and compiled: the same training as trl's own head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from inductor_grpo import config
from tests import harness, models

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

if not hasattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies"):
    pytest.skip("this trl takes its log-probabilities elsewhere", allow_module_level=True)

WORDS = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(models.VOCABULARY - 3)]
PROMPTS = [" ".join(f"w{(i * 7 + j) % 500}" for j in range(3 + i % 4)) for i in range(32)]


def logps_and_entropies(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, keep: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=keep + 1).logits[:, :-1]
    logps = (logits / temperature).float().log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    picked = logps.gather(-1, input_ids[:, -keep:].unsqueeze(-1)).squeeze(-1)
    unread = attention_mask[:, -keep:] == 0
    return picked.masked_fill(unread, 0), entropies.masked_fill(unread, 0)


def of_the_head(
    lm_head: Any, hidden: torch.Tensor, input_ids: torch.Tensor, unread: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logps = (lm_head(hidden) / temperature).float().log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    picked = logps.gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(unread, 0), entropies.masked_fill(unread, 0)


def whole_model() -> Any:
    """The model and the log-probs in one compiled function."""
    return torch.compile(logps_and_entropies, backend=harness.backend())


def head_alone() -> Any:
    """The head and the log-probs; the model runs in eager."""
    head = torch.compile(of_the_head, backend=harness.backend())

    def score(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, keep: int, temperature: float) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        hidden = model.base_model(**inputs).last_hidden_state[:, -keep - 1 : -1]
        unread = attention_mask[:, -keep:] == 0
        return head(model.get_output_embeddings(), hidden, input_ids[:, -keep:], unread, temperature)

    return score


class NaiveTrainer(trl.GRPOTrainer):
    """As docs/clients/trl.md has it."""

    score: Any = staticmethod(logps_and_entropies)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        size = batch_size or len(input_ids)
        parts = [
            self.score(model, ids, mask, logits_to_keep, self.temperature)
            for ids, mask in zip(input_ids.split(size), attention_mask.split(size))
        ]
        logps, entropies = (torch.cat(part) for part in zip(*parts))
        return logps, entropies if compute_entropy else None, None


def reward(completions: list[str], **_: Any) -> list[float]:
    """How many words have an odd number."""
    return [float(sum(int(word[1:]) % 2 for word in text.split() if word[0] == "w")) for text in completions]


def train(trainer: type, folder: Path, name: str, **more: Any) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """What four updates log, and the weights after them."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    settings = {
        "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 4,
        "logging_steps": 1, "learning_rate": 1e-2, "seed": 1, "temperature": 0.9, "gradient_checkpointing": False,
    }  # fmt: skip
    run = trainer(
        model=models.build(name),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(folder), **{**settings, **more}),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=models.transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
    )
    run.train()
    keys = ("loss", "grad_norm", "entropy", "reward")
    steps = [{key: float(entry[key]) for key in keys if key in entry} for entry in run.state.log_history]
    return [step for step in steps if "loss" in step], list(run.model.parameters())


@pytest.mark.parametrize(
    "scorer, name, more, graphs",
    [
        (whole_model, "gemma3", {}, 2),  # one static, one for all lengths
        (whole_model, "qwen3", {"num_iterations": 2, "steps_per_generation": 2}, 2),  # the old ones without gradients
        (head_alone, "qwen3", {"gradient_checkpointing": True}, 1),
    ],
)
def test_same_training_as_its_own_head(
    scorer: Any, name: str, more: dict[str, Any], graphs: int, tmp_path: Path
) -> None:
    expected, weights = train(trl.GRPOTrainer, tmp_path, name, **more)
    facts = harness.Graphs(frozenset({models.VOCABULARY}), frozenset({models.FEATURES}))
    compiled = type("CompiledTrainer", (NaiveTrainer,), {})
    compiled.score = staticmethod(scorer())
    with config.patch(min_logits_bytes=0, chunk_bytes=40 * models.VOCABULARY * 4, codegen="eager"):
        with harness.recording(facts):
            steps, trained = train(compiled, tmp_path, name, **more)
    for step, want in zip(steps, expected, strict=True):
        assert step == pytest.approx(want, rel=1e-4, abs=1e-5)
    before = list(models.build(name).parameters())
    moved = max((new - old).abs().max().item() for new, old in zip(trained, before, strict=True))
    apart = max((new - old).abs().max().item() for new, old in zip(trained, weights, strict=True))
    assert moved > 5e-3 and apart < moved / 10
    harness.assert_streamed(facts)
    assert facts.count == graphs


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """As docs/clients/transformers.md has it, with accumulated gradients, whose loss is divided by all items."""

    def own_loss(model: Any, inputs: dict[str, torch.Tensor], items: Any) -> torch.Tensor:
        return model(**inputs, num_items_in_batch=items).loss

    call = torch.compile(own_loss, backend=harness.backend())
    transformers = models.transformers

    class Streamed(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            if return_outputs:
                return super().compute_loss(model, inputs, True, num_items_in_batch)
            return call(model, inputs, num_items_in_batch)

    rows = torch.randint(3, 500, (24, 17)).tolist()
    arguments = {
        "output_dir": str(tmp_path), "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    logs = []
    facts = harness.Graphs(frozenset({models.VOCABULARY}), frozenset({models.FEATURES}))
    with config.patch(min_logits_bytes=0, chunk_bytes=40 * models.VOCABULARY * 4, codegen="eager"):
        with harness.recording(facts):
            for trainer in (transformers.Trainer, Streamed):
                run = trainer(
                    model=models.build("qwen3"),
                    args=transformers.TrainingArguments(**arguments),
                    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
                )
                run.train()
                logs.append([(h["loss"], h["grad_norm"]) for h in run.state.log_history if "loss" in h])
    torch.testing.assert_close(torch.tensor(logs[1]), torch.tensor(logs[0]), rtol=1e-4, atol=1e-5)
    harness.assert_streamed(facts)
    assert (facts.regions, facts.matmuls) == (1, 3)
