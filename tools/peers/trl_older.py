"""TRL before 1.15: the trainer takes log-probs from the model's logits, in place and row by row."""

from __future__ import annotations

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.trl import METRICS, PROFILED, grpo_loss

newer = cases_of("trl", "1.9.2", cuts=METRICS)
older = cases_of("trl", "0.17.0", cuts=METRICS)

NEWER = "trl.GRPOTrainer._compute_loss, _get_per_token_logps_and_entropies"
OLDER = "trl.GRPOTrainer._compute_loss, _get_per_token_logps"
IN_PLACE = "logits.div_(temperature) on a view, selective_log_softmax, entropy_from_logits under no_grad"


def _loss(**settings: object) -> Made:
    from trl import GRPOTrainer

    return grpo_loss(GRPOTrainer, **settings)


@newer(
    NEWER,
    "loss_type grpo, beta 0.04, as it is",
    PROFILED.format(name="_get_per_token_logps_and_entropies"),
)
def trainer_profiled() -> Made:
    return _loss(beta=0.04, profiled=True)


@newer(NEWER, f"loss_type grpo, beta 0.04; {IN_PLACE}")
def trainer_grpo() -> Made:
    return _loss(beta=0.04)


@newer(NEWER, "loss_type dapo, entropy bonus with a gradient")
def trainer_dapo_entropy() -> Made:
    return _loss(loss_type="dapo", _entropy_bonus_enabled=True)


@newer(NEWER, "GSPO: importance_sampling_level sequence")
def trainer_gspo() -> Made:
    return _loss(importance_sampling_level="sequence")


@newer(NEWER, "loss_type bnpo, top_entropy_quantile 0.5: a mask from a quantile of the entropies")
def trainer_entropy_quantile() -> Made:
    return _loss(loss_type="bnpo", top_entropy_quantile=0.5)


@newer(NEWER, "loss_type dr_grpo, delta 4")
def trainer_dr_grpo() -> Made:
    return _loss(loss_type="dr_grpo")


@older(OLDER, "loss_type grpo, beta 0.04, as it is", PROFILED.format(name="_get_per_token_logps"))
def trainer_profiled_0_17() -> Made:
    return _loss(beta=0.04, profiled=True)


@older(OLDER, "loss_type grpo, beta 0.04; logits / temperature, logsumexp in a loop over batch rows")
def trainer_grpo_0_17() -> Made:
    return _loss(beta=0.04)


@older(OLDER, "loss_type bnpo, beta 0")
def trainer_bnpo_0_17() -> Made:
    return _loss(loss_type="bnpo")
