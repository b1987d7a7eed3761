"""AReaL 1.0.4: gathered log-probs and entropies of packed tokens, and its actor losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of
from inductor_grpo.tools.peers.inputs import packed, padded

CUTS = (
    "the losses branch on loss_mask.count_nonzero() and repeat ids by lengths, behind the log-probs: nothing needs to "
    "be written as long as all that reads the logits comes first"
)

case = cases_of("areal", "1.0.4", cuts=CUTS)

GATHER = "areal.utils.functional.vocab_parallel.gather_logprobs"
PPO = "areal.utils.functional.functional.ppo_actor_loss_fn"


def _ppo(dtype: torch.dtype = torch.float32, chunk: int = 1024, **settings: Any) -> Made:
    from areal.utils.functional.functional import ppo_actor_loss_fn
    from areal.utils.functional.vocab_parallel import gather_logprobs

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cu: Tensor
    ) -> Tensor:
        logp = gather_logprobs(hidden @ weight.T, ids, temperature=0.7, chunk_size=chunk)
        return ppo_actor_loss_fn(logp, old, old, advantages, 0.2, mask, cu_seqlens=cu, **settings)[0]

    b = packed(dtype)
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask, b.cu)


@case(f"{GATHER}, {PPO}", "packed [N, V], temperature 0.7, token level, c_clip 3")
def ppo_token() -> Made:
    return _ppo(c_clip=3.0)


@case(f"{GATHER}, {PPO}", "packed [N, V], GSPO: importance_sampling_level sequence with cu_seqlens")
def ppo_sequence() -> Made:
    return _ppo(importance_sampling_level="sequence")


@case(f"{GATHER}, {PPO}", "the same in bfloat16, with chunk_size 4: logits sliced into chunks of rows")
def ppo_sequence_chunked_bf16() -> Made:
    return _ppo(torch.bfloat16, 4, importance_sampling_level="sequence")


@case(f"{GATHER}, {PPO}", "padded [B, T, V], importance_sampling_level sequence")
def ppo_sequence_padded() -> Made:
    from areal.utils.functional.functional import ppo_actor_loss_fn
    from areal.utils.functional.vocab_parallel import gather_logprobs

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = gather_logprobs(hidden @ weight.T, ids)
        return ppo_actor_loss_fn(logp, old, old, advantages, 0.2, mask, importance_sampling_level="sequence")[0]

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(f"{GATHER}_entropy, {PPO}", "log-prob and entropy of one log_softmax, entropy bonus")
def ppo_entropy() -> Made:
    from areal.utils.functional.functional import ppo_actor_loss_fn
    from areal.utils.functional.vocab_parallel import gather_logprobs_entropy

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp, entropy = gather_logprobs_entropy(hidden @ weight.T, ids)
        loss = ppo_actor_loss_fn(logp, old, old, advantages, 0.2, mask)[0]
        return loss - 0.01 * torch.where(mask, entropy, 0.0).sum() / mask.sum()

    b = packed()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask)


@case(f"{GATHER}, areal.utils.functional.functional.sapo_loss_fn", "packed, sequence level with cu_seqlens")
def sapo_sequence() -> Made:
    from areal.utils.functional.functional import sapo_loss_fn
    from areal.utils.functional.vocab_parallel import gather_logprobs

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cu: Tensor
    ) -> Tensor:
        logp = gather_logprobs(hidden @ weight.T, ids)
        return sapo_loss_fn(logp, old, advantages, 1.0, 1.05, mask, "sequence", cu)[0]

    b = packed()
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask, b.cu)


@case(
    f"{GATHER}, areal.utils.functional.functional.dpo_pair_logratios, dpo_preference_loss",
    "packed pairs, float64 sums per sequence",
)
def dpo() -> Made:
    from areal.utils.functional.functional import dpo_pair_logratios, dpo_preference_loss
    from areal.utils.functional.vocab_parallel import gather_logprobs

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, ref: Tensor, mask: Tensor, cu: Tensor, valid: Tensor
    ) -> Tensor:
        logp = gather_logprobs(hidden @ weight.T, ids)
        policy, reference, _ = dpo_pair_logratios(logp, ref, cu, mask, valid)
        delta = (policy - reference)[:, 0] - (policy - reference)[:, 1]
        return dpo_preference_loss(delta, beta=0.1).mean()

    b = packed()
    cu = torch.tensor([0, 7, 10, 13, 15])
    return step, (b.hidden, b.weight, b.ids, b.ref, b.mask, cu, torch.ones(2, dtype=torch.bool))
