"""torchrl 0.14.1: LLMMaskedCategorical, which its GRPO losses and its transformers wrapper take log-probs from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.inputs import padded, policy_loss

case = cases_of("torchrl", "0.14.1")

DISTRIBUTION = "torchrl.modules.LLMMaskedCategorical"
OBJECTIVE = "torchrl.objectives.llm.GRPOLoss._compute_policy_objective, _aggregate_loss_value"


@case(f"{DISTRIBUTION}.log_prob", "[B, T, V], a mask of positions")
def positions() -> Made:
    from torchrl.modules.distributions.discrete import LLMMaskedCategorical

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = LLMMaskedCategorical(logits=hidden @ weight.T, mask=mask).log_prob(ids)
        return policy_loss(logp, old, advantages, mask)

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(f"{DISTRIBUTION}.log_prob", "[B, T, V] bfloat16, a mask of tokens [B, T, V]")
def tokens() -> Made:
    from torchrl.modules.distributions.discrete import LLMMaskedCategorical

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, allowed: Tensor
    ) -> Tensor:
        logp = LLMMaskedCategorical(logits=hidden @ weight.T, mask=allowed).log_prob(ids)
        return policy_loss(logp, old, advantages, mask)

    b = padded(torch.bfloat16)
    allowed = torch.arange(b.weight.shape[0]) % 5 != 1
    allowed = allowed.expand(*b.ids.shape, -1).clone().scatter_(-1, b.ids[..., None], True)
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask, allowed)


CHECKED = (
    "entropy() asks the masked logits whether they are finite, which cuts the graph: "
    "write it from policy.logits, -(logp.exp() * logp).sum(-1) with logp = policy.logits.log_softmax(-1)"
)


@case(f"{DISTRIBUTION}.log_prob, .entropy", "entropy bonus of a position mask", CHECKED)
def entropy() -> Made:
    return _entropy(written=False)


@case(f"{DISTRIBUTION}.log_prob, .logits", "entropy bonus, the entropy written from .logits")
def entropy_written() -> Made:
    return _entropy(written=True)


def _entropy(written: bool) -> Made:
    from torchrl.modules.distributions.discrete import LLMMaskedCategorical

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        policy = LLMMaskedCategorical(logits=hidden @ weight.T, mask=mask)
        loss = policy_loss(policy.log_prob(ids), old, advantages, mask)
        if written:
            logp = policy.logits.log_softmax(-1)
            each = -(logp.exp() * logp).sum(-1)
        else:
            each = policy.entropy()
        return loss - 0.01 * torch.where(mask, each, 0.0).sum() / mask.sum()

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(f"{DISTRIBUTION}.log_prob", "jagged: hidden, tokens and mask packed, log-probs padded with to_padded_tensor")
def jagged() -> Made:
    from torchrl.modules.distributions.discrete import LLMMaskedCategorical

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor
    ) -> Tensor:
        logits = hidden @ weight.T
        packed = LLMMaskedCategorical(logits=logits, mask=torch.ones_like(ids, dtype=torch.bool)).log_prob(ids)
        nested = torch.nested.nested_tensor_from_jagged(packed, offsets)
        logp = nested.to_padded_tensor(0.0, output_size=tuple(mask.shape))
        return policy_loss(logp, old, advantages, mask)

    b = padded()
    hidden, ids = b.hidden.detach()[b.mask].requires_grad_(), b.ids[b.mask]
    return step, (hidden, b.weight, ids, b.old, b.advantages, b.mask, b.cu.long())


@case(f"{DISTRIBUTION}.log_prob, {OBJECTIVE}", "aggregation token_mean; methods on a stand-in for the loss module")
def grpo() -> Made:
    return _objective("GRPOLoss")


@case(f"{DISTRIBUTION}.log_prob, {OBJECTIVE}".replace("GRPOLoss", "CISPOLoss"), "aggregation prompt_mean")
def cispo() -> Made:
    return _objective("CISPOLoss", aggregation="prompt_mean")


def _objective(name: str, **settings: Any) -> Made:
    from torchrl.modules.distributions.discrete import LLMMaskedCategorical
    from torchrl.objectives import llm
    from torchrl.objectives.llm.grpo import GRPOLoss

    methods = {
        "_compute_policy_objective": getattr(llm, name)._compute_policy_objective,
        "_aggregate_loss_value": GRPOLoss._aggregate_loss_value,
        "_reduce_loss": GRPOLoss._reduce_loss,
        "_expand_loss_mask": staticmethod(GRPOLoss._expand_loss_mask),
    }
    loss_of = type("Loss", (), methods)()
    bounds = ((1 - torch.tensor(0.2)).log(), (1 + torch.tensor(0.2)).log())
    defaults = {"_clip_bounds": bounds, "aggregation": "token_mean", "reduction": "mean"}
    for key, value in {**defaults, **settings}.items():
        setattr(loss_of, key, value)

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = LLMMaskedCategorical(logits=hidden @ weight.T, mask=mask).log_prob(ids)
        log_weight = torch.where(mask, logp - old, 0.0).unsqueeze(-1)
        loss, _ = loss_of._compute_policy_objective(log_weight, advantages.unsqueeze(-1))
        return loss_of._aggregate_loss_value(loss, mask).sum()

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)
