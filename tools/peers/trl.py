"""TRL 1.16: the log-prob helpers, and the trainer's own loss on a model that gives logits."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.inputs import PROMPT, padded, policy_loss

case = cases_of("trl", "1.16.0")

SELECTIVE = "trl.trainer.utils.selective_log_softmax"
ENTROPY = "trl.trainer.utils.entropy_from_logits"
BOTH = "trl.trainer.utils.selective_log_softmax_and_entropy"
TRAINER = "trl.GRPOTrainer._compute_loss"


@case(SELECTIVE, "[B, T, V] float32, temperature 0.7; logsumexp in a loop over batch rows")
def selective() -> Made:
    return _selective(torch.float32)


@case(SELECTIVE, "[B, T, V] bfloat16, temperature 0.7; log_softmax in a loop over batch rows")
def selective_bf16() -> Made:
    return _selective(torch.bfloat16)


def _selective(dtype: torch.dtype) -> Made:
    from trl.trainer.utils import selective_log_softmax

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = selective_log_softmax(hidden @ weight.T, ids, temperature=0.7)
        return policy_loss(logp, old, advantages, mask)

    b = padded(dtype)
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(SELECTIVE, "[N, V] packed: logsumexp in a loop over tokens, 21 of them")
def selective_per_token() -> Made:
    from trl.trainer.utils import selective_log_softmax

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logits = (hidden @ weight.T).flatten(0, 1)
        logp = selective_log_softmax(logits, ids.flatten()).unflatten(0, ids.shape)
        return policy_loss(logp, old, advantages, mask)

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(SELECTIVE, "row_mask of the answer")
def selective_row_mask() -> Made:
    from trl.trainer.utils import selective_log_softmax

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = selective_log_softmax(hidden @ weight.T, ids, row_mask=mask)
        return policy_loss(logp, old, advantages, mask)

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(f"{SELECTIVE}, {ENTROPY}", "both with gradients, entropy in chunks of 5 rows")
def entropy_bonus() -> Made:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logits = hidden @ weight.T
        entropy = entropy_from_logits(logits, chunk_size=5)
        loss = policy_loss(selective_log_softmax(logits, ids), old, advantages, mask)
        return loss - 0.01 * (entropy * mask).sum() / mask.sum()

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(f"{SELECTIVE}, {ENTROPY}", "entropy of the same logits under no_grad, returned beside the loss")
def entropy_no_grad() -> Made:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        logits = hidden @ weight.T
        logp = selective_log_softmax(logits, ids)
        with torch.no_grad():
            entropy = entropy_from_logits(logits)
        return policy_loss(logp, old, advantages, mask), (entropy * mask).sum() / mask.sum()

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(BOTH, "temperature 0.7, entropy with a gradient")
def both() -> Made:
    return _both(True)


@case(BOTH, "temperature 0.7, entropy_requires_grad=False, entropy returned")
def both_entropy_detached() -> Made:
    return _both(False)


def _both(gradient: bool) -> Made:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        logits = hidden @ weight.T
        logp, entropy = selective_log_softmax_and_entropy(logits, ids, temperature=0.7, entropy_requires_grad=gradient)
        loss, bonus = policy_loss(logp, old, advantages, mask), (entropy * mask).sum() / mask.sum()
        return loss - 0.01 * bonus if gradient else (loss, bonus)

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


# The trainer's loss: its unbound methods on a stand-in for the trainer, with what they read of it -------------------


class Accelerator:
    """One process: everything is gathered and reduced already."""

    num_processes = 1
    is_main_process = True
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value

    def pad_across_processes(self, value: Tensor, dim: int = 0, pad_index: float = 0) -> Tensor:
        return value

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)


PROFILED = (
    "TRL times the method with time.perf_counter, which cuts the graph: "
    "take it without its decorator, GRPOTrainer.{name} = GRPOTrainer.{name}.__wrapped__"
)


def trainer(methods: type, profiled: bool = False, **settings: Any) -> Any:
    """An object with the methods of a GRPOTrainer that compute the loss, and the settings that they read.

    ``profiled`` leaves the decorator on that measures the time of a method."""
    names = ("_get_per_token_logps", "_get_per_token_logps_and_entropies", "_compute_loss", "get_off_policy_mask")
    found = {name: vars(methods)[name] for name in (*names, "get_gamma_weights", "get_high_entropy_mask")
             if name in vars(methods)}  # fmt: skip
    if not profiled:
        found = {n: m if isinstance(m, staticmethod) else getattr(m, "__wrapped__", m) for n, m in found.items()}
    stand_in = type("Trainer", (), found)()
    arguments: dict[str, Any] = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        "report_to": [],
    }
    defaults = {
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(**arguments),
        "control": SimpleNamespace(should_evaluate=False),
        "state": SimpleNamespace(global_step=1),
        "temperature": 0.7,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "num_iterations": 2,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.01,
        "router_aux_loss_coef": 0.0,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 8,
        "model_kwarg_keys": ("logits_to_keep",),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_last_world_entropy": 0.0,
        "_entropy_window_stats": None,
    }
    for name, value in {**defaults, **settings}.items():
        setattr(stand_in, name, value)
    return stand_in


def trainer_inputs(ref: bool = True) -> tuple[Any, ...]:
    """hidden [B, prompt + T, H], weight, then the tensors of a batch in the order of :func:`batch_of`."""
    b = padded(prompt=PROMPT)
    prompt, answer = b.ids[:, :PROMPT], b.ids[:, PROMPT:]
    return b.hidden, b.weight, prompt, answer, b.mask.long(), b.old, b.ref, b.scores


def batch_of(prompt: Tensor, answer: Tensor, mask: Tensor, old: Tensor, ref: Tensor, scores: Tensor) -> dict[str, Any]:
    """The ``inputs`` that a trainer gives to ``_compute_loss``."""
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": answer,
        "completion_mask": mask,
        "advantages": scores,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }


@dataclasses.dataclass
class Output:
    """What a model returns, as far as the trainer reads it."""

    logits: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def model_of(hidden: Tensor, weight: Tensor) -> Any:
    """A model in place of one of transformers: it projects what it was given, the last positions alone if asked."""

    def model(logits_to_keep: int = 0, **_: Any) -> Output:
        return Output(logits=hidden[:, -logits_to_keep:] @ weight.T)

    return model


def grpo_loss(methods: Any, **settings: Any) -> Made:
    """The trainer's own ``_compute_loss`` on a model that gives logits."""
    loss_of = trainer(methods, **settings)

    def step(hidden: Tensor, weight: Tensor, *batch: Tensor) -> Tensor:
        return loss_of._compute_loss(model_of(hidden, weight), batch_of(*batch))

    return step, trainer_inputs()


# From 1.16 on the trainer's model gives log-probs: TRL puts a forward of its own in front of the head, which runs the
# head in tiles inside an autograd.Function.  Without that forward the model gives logits, and this is what to write.

LOGITS = "model without add_fused_lm_head; log-probs by selective_log_softmax_and_entropy of its logits"


class _Scored:
    """What a model with TRL's head returns, from logits and TRL's own function for them."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, entropy_requires_grad: bool) -> None:
        self.hidden, self.weight = hidden, weight
        self.temperature, self.entropy_requires_grad = temperature, entropy_requires_grad

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Output:
        from trl.trainer.utils import selective_log_softmax_and_entropy

        logits = self.hidden[:, :-1] @ self.weight.T
        labels = labels[:, 1:].clamp(min=0)
        logp, entropy = selective_log_softmax_and_entropy(
            logits, labels, temperature=self.temperature, entropy_requires_grad=self.entropy_requires_grad
        )
        return Output(log_probs=logp, entropy=entropy)


def _logits_path(**settings: Any) -> Made:
    from trl import GRPOTrainer

    loss_of = trainer(GRPOTrainer, **settings)

    def step(hidden: Tensor, weight: Tensor, *batch: Tensor) -> Tensor:
        model = _Scored(hidden, weight, loss_of.temperature, loss_of._entropy_bonus_enabled)
        return loss_of._compute_loss(model, batch_of(*batch))

    return step, trainer_inputs()


@case(
    TRAINER,
    f"loss_type grpo, beta 0.04, as it is; {LOGITS}",
    PROFILED.format(name="_get_per_token_logps_and_entropies"),
)
def trainer_profiled() -> Made:
    return _logits_path(beta=0.04, profiled=True)


@case(TRAINER, f"loss_type grpo, beta 0.04; {LOGITS}")
def trainer_grpo() -> Made:
    return _logits_path(beta=0.04)


@case(TRAINER, f"loss_type dapo, entropy bonus; {LOGITS}")
def trainer_dapo_entropy() -> Made:
    return _logits_path(loss_type="dapo", _entropy_bonus_enabled=True)


@case(TRAINER, f"GSPO: importance_sampling_level sequence; {LOGITS}")
def trainer_gspo() -> Made:
    return _logits_path(importance_sampling_level="sequence")


@case(TRAINER, f"loss_type cispo; {LOGITS}")
def trainer_cispo() -> Made:
    return _logits_path(loss_type="cispo", epsilon_high=5.0)


@case(TRAINER, f"loss_type vespo; {LOGITS}")
def trainer_vespo() -> Made:
    return _logits_path(loss_type="vespo")


@case(TRAINER, f"loss_type sapo, off_policy_mask_threshold 0.5; {LOGITS}")
def trainer_sapo() -> Made:
    return _logits_path(loss_type="sapo", off_policy_mask_threshold=0.5)
