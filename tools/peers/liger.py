"""Liger 0.8.5: the losses of its chunked classes, on log-probs of the whole batch; and its hand-fused loss itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.inputs import padded

case = cases_of("liger-kernel", "0.8.5", "liger_kernel")

GRPO = "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn"


def _grpo(dtype: torch.dtype = torch.float32, **settings: Any) -> Made:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    loss_of = LigerFusedLinearGRPOFunction.ppo_loss_fn

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, ref: Tensor, scores: Tensor, mask: Tensor
    ) -> Tensor:
        logits = (hidden @ weight.T).float() / 0.7
        logp = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return loss_of(logp, mask, scores, mask, ref, old, **settings)[0]

    b = padded(dtype)
    return step, (b.hidden, b.weight, b.ids, b.old, b.ref, b.scores, b.mask.float())


@case(GRPO, "loss_type grpo, token level, beta 0.04, bfloat16; log_softmax in front")
def grpo() -> Made:
    return _grpo(torch.bfloat16, loss_type="grpo")


@case(GRPO, "GSPO: importance_sampling_level sequence, beta 0; log_softmax in front")
def gspo() -> Made:
    return _grpo(loss_type="grpo", beta=0.0, importance_sampling_level="sequence")


@case(GRPO, "loss_type dr_grpo, delta 4; log_softmax in front")
def dr_grpo() -> Made:
    return _grpo(loss_type="dr_grpo", beta=0.0, delta=4.0, max_completion_length=8)


@case(GRPO, "loss_type luspo, sequence level; log_softmax in front")
def luspo() -> Made:
    return _grpo(loss_type="luspo", beta=0.0, importance_sampling_level="sequence")


@case(GRPO, "loss_type vespo; log_softmax in front")
def vespo() -> Made:
    return _grpo(loss_type="vespo", beta=0.0)


PREFERENCE = "liger_kernel.chunked_loss.fused_linear_preference.LigerFusedLinearPreferenceBase.chunk_forward"


@case(f"{PREFERENCE}, dpo_loss.LigerFusedLinearDPOFunction.preference_loss_fn", "its logits, labels with -100")
def dpo() -> Made:
    from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction as function

    def step(hidden: Tensor, weight: Tensor, labels: Tensor, ref: Tensor) -> Tensor:
        chosen, rejected, *_ = function.chunk_forward(
            hidden[:2], weight, labels[:2], compute_nll_loss=False, average_log_prob=False
        )
        return function.preference_loss_fn(
            chosen, rejected, labels[:2], ref_chosen_logps=ref[:1], ref_rejected_logps=ref[1:2]
        )[0]

    b = padded()
    labels = b.ids.masked_fill(~b.mask, -100)
    return step, (b.hidden, b.weight, labels, (b.ref * b.mask).sum(-1))


@case(
    "liger_kernel.chunked_loss.jsd_loss.LigerFusedLinearJSDFunction.chunk_forward, distillation_loss_fn",
    "student and teacher heads of the same vocabulary, beta 0.5",
)
def jsd() -> Made:
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction as function

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
        student_logits, teacher_logits, hard = function.chunk_forward(
            hidden, weight, teacher, teacher_weight, ids, ignore_index=-100, compute_ce_loss=True
        )
        soft = function.distillation_loss_fn(student_logits, teacher_logits, beta=0.5)
        return 0.5 * hard + 0.5 * soft / ids.numel()

    b = padded()
    hidden, ids = b.hidden.detach().flatten(0, 1).requires_grad_(), b.ids.flatten()
    teacher = hidden.detach() + 0.1 * torch.arange(hidden.shape[1])
    return step, (hidden, b.weight, ids, teacher, b.weight.detach().roll(1, 0))


@case(
    "liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss",
    "the hand-fused loss, compiled=False, chunks of one sequence",
    cure="hand-fused already: its autograd.Function runs forward and backward in the forward; write logits instead",
)
def fused_grpo() -> Made:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_of = LigerFusedLinearGRPOLoss(beta=0.04, compiled=False, use_ref_model=True, loss_type="grpo", chunk_size=1)

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, ref: Tensor, scores: Tensor, mask: Tensor
    ) -> Tensor:
        return loss_of(hidden, weight, ids, mask, scores, ref_per_token_logps=ref, old_per_token_logps=old)[0]

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.ref, b.scores, b.mask.float())
