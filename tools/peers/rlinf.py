"""RLinf 0.3.0: log-probs by cross_entropy, entropies, and its actor losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.inputs import padded

CUTS = (
    "the losses branch on counts of the mask, behind the log-probs: nothing needs to be written as long as all that "
    "reads the logits comes first"
)

case = cases_of("rlinf", "0.3.0", cuts=CUTS)

LOGPROBS = "rlinf.utils.utils.compute_logprobs_from_logits"
ENTROPY = "rlinf.utils.utils.compute_entropy_from_logits"
PPO = "rlinf.algorithms.losses.compute_ppo_actor_loss"


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    b = padded(dtype)
    return b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask


def _ppo(dtype: torch.dtype = torch.float32, **settings: Any) -> Made:
    from rlinf.algorithms.losses import compute_ppo_actor_loss
    from rlinf.utils.utils import compute_logprobs_from_logits

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = compute_logprobs_from_logits(hidden @ weight.T, ids, "torch")
        return compute_ppo_actor_loss(logp, old, 0.2, 0.2, advantages, mask, **settings)[0]

    return step, _inputs(dtype)


@case(f"{LOGPROBS}, {PPO}", "[B, T, V] float32, clip_ratio_c 3, clip_log_ratio_min and _max")
def ppo() -> Made:
    return _ppo(clip_ratio_c=3.0, clip_log_ratio_min=-20.0, clip_log_ratio_max=20.0)


@case(f"{LOGPROBS}, {PPO}", "[B, T, V] bfloat16: cross_entropy in bfloat16, then float32")
def ppo_bf16() -> Made:
    return _ppo(torch.bfloat16)


BREAKS = (
    "the loss branches on loss_mask.count_nonzero(), which cuts the graph there: "
    "take everything that reads the logits before the call"
)


@case(f"{LOGPROBS}, {PPO}, {ENTROPY}", "entropy bonus, the entropy taken after the loss", BREAKS)
def ppo_entropy_last() -> Made:
    return _entropy(first=False)


@case(f"{LOGPROBS}, {ENTROPY}, {PPO}", "entropy bonus, the entropy taken before the loss")
def ppo_entropy_first() -> Made:
    return _entropy(first=True)


def _entropy(first: bool) -> Made:
    from rlinf.algorithms.losses import compute_ppo_actor_loss
    from rlinf.utils.utils import compute_entropy_from_logits, compute_logprobs_from_logits, masked_mean

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logits = hidden @ weight.T
        logp, entropy = compute_logprobs_from_logits(logits, ids, "torch"), compute_entropy_from_logits(logits)
        loss = compute_ppo_actor_loss(logp, old, 0.2, 0.2, advantages, mask)[0]
        return loss - 0.01 * masked_mean(entropy, mask)

    def entropy_last(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        logits = hidden @ weight.T
        logp = compute_logprobs_from_logits(logits, ids, "torch")
        loss = compute_ppo_actor_loss(logp, old, 0.2, 0.2, advantages, mask)[0]
        return loss - 0.01 * masked_mean(compute_entropy_from_logits(logits), mask)

    return step if first else entropy_last, _inputs()


@case(f"{LOGPROBS}, rlinf.algorithms.losses.compute_decoupled_ppo_actor_loss", "[B, T, V], logits / temperature")
def decoupled() -> Made:
    from rlinf.algorithms.losses import compute_decoupled_ppo_actor_loss
    from rlinf.utils.utils import compute_logprobs_from_logits

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logits = (hidden @ weight.T) / 0.7
        logp = compute_logprobs_from_logits(logits, ids, "torch")
        return compute_decoupled_ppo_actor_loss(logp, old, 0.2, 0.2, advantages, loss_mask=mask)[0]

    return step, _inputs()
