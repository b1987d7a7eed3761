"""torchtune 0.6.1: log-probs of sequences, and its PPO, DPO losses."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.inputs import PROMPT, padded, policy_loss

case = cases_of("torchtune", "0.6.1")

LOGPROBS = "torchtune.rlhf.logits_to_logprobs"


@case(LOGPROBS, "[B, T, V], temperature 0.7")
def logprobs() -> Made:
    from torchtune.rlhf import logits_to_logprobs

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = logits_to_logprobs(hidden @ weight.T, ids, temperature=0.7)
        return policy_loss(logp, old, advantages, mask)

    b = padded(torch.bfloat16)
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(
    f"torchtune.rlhf.truncate_sequence_for_logprobs, {LOGPROBS}, torchtune.rlhf.loss.PPOLoss",
    "logits of prompt and answer; value loss beside the policy's",
)
def ppo() -> Made:
    from torchtune import rlhf
    from torchtune.rlhf.loss import PPOLoss

    loss_of = PPOLoss()

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, values: Tensor
    ) -> Tensor:
        logits = rlhf.truncate_sequence_for_logprobs(hidden @ weight.T, PROMPT)
        logp = rlhf.logits_to_logprobs(logits, ids[:, PROMPT:], 0.9)
        loss = loss_of(old, logp, advantages, values.detach(), values, values.detach() + advantages, mask, mask)
        return loss[0]

    b = padded(prompt=PROMPT)
    values = torch.linspace(-1, 1, b.mask.numel()).view(b.mask.shape).clone().requires_grad_()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask, values)


@case("torchtune.rlhf.get_batch_log_probs, torchtune.rlhf.loss.DPOLoss", "labels with -100; chosen and rejected rows")
def dpo() -> Made:
    from torchtune.rlhf import get_batch_log_probs
    from torchtune.rlhf.loss import DPOLoss

    loss_of = DPOLoss(beta=0.1)

    def step(hidden: Tensor, weight: Tensor, labels: Tensor, ref: Tensor) -> Tensor:
        logps = get_batch_log_probs(hidden @ weight.T, labels)
        return loss_of(logps[:1], logps[1:2], ref[:1], ref[1:2])[0].mean()

    b = padded()
    labels = b.ids.masked_fill(~b.mask, -100)
    return step, (b.hidden, b.weight, labels, (b.ref * b.mask).sum(-1))
