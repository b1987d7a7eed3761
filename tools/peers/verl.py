"""verl 0.9.1: log-probs and entropies, every policy loss and KL penalty, and the engine's own path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools.peers.case import Made, cases_of, with_scalar_outputs
from inductor_grpo.tools.peers.inputs import packed, padded, policy_loss
from inductor_grpo.tools.peers.trl import Output

case = cases_of("verl", "0.9.1")

F = "verl.utils.torch_functional"
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
PENALTIES = ("k1", "abs", "k2", "low_var_kl", "k1+", "k3+")
METRICS = (
    "each loss ends with .item() of its metrics, which cuts the graph after the head: "
    "torch._dynamo.config.capture_scalar_outputs = True keeps one graph"
)


def _config(**settings: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)


def _loss(name: str, mode: str = "token-mean", eager: bool = False, one_graph: bool = False) -> Made:
    """``eager``: the loss is left to Python; ``one_graph``: .item() does not cut the graph."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.torch_functional import logprobs_from_logits

    loss_of, config = get_policy_loss_fn(name), _config()
    if eager:
        loss_of = torch.compiler.disable(loss_of)

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, temperature: Tensor
    ) -> Tensor:
        logits = (hidden @ weight.T) / temperature.clamp(min=1e-8).unsqueeze(-1).unsqueeze(-1)
        logp = logprobs_from_logits(logits, ids)
        return loss_of(
            old_log_prob=old,
            log_prob=logp,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
        )[0]

    b = padded()
    temperature = torch.tensor([0.7, 1.0, 1.3])
    if one_graph:
        step = with_scalar_outputs(step)
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask.float(), temperature)


STOCK = (
    "torch.compile cannot compile this loss, ours or stock: leave it to Python, "
    "policy_loss = torch.compiler.disable(get_policy_loss_fn('clip_cov'))"
)


def _cure(name: str) -> str:
    return {"gpg": "", "clip_cov": STOCK}.get(name, METRICS)


@case(
    f"{F}.logprobs_from_logits, core_algos.get_policy_loss_fn('vanilla')",
    "[B, T, V], a tensor of temperatures [B], token-mean, with capture_scalar_outputs",
)
def loss_vanilla_one_graph() -> Made:
    return _loss("vanilla", one_graph=True)


@case(
    f"{F}.logprobs_from_logits, core_algos.get_policy_loss_fn('gspo')",
    "[B, T, V], a tensor of temperatures [B], seq-mean-token-mean, with capture_scalar_outputs",
)
def loss_gspo_one_graph() -> Made:
    return _loss("gspo", "seq-mean-token-mean", one_graph=True)


@case(
    f"{F}.logprobs_from_logits, core_algos.get_policy_loss_fn('clip_cov')",
    "[B, T, V], a tensor of temperatures [B], token-mean, the loss under torch.compiler.disable",
    "the cut is the one that was asked for",
)
def loss_clip_cov_in_python() -> Made:
    return _loss("clip_cov", eager=True)


def _register_losses() -> None:
    for name in LOSSES:
        mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
        case(
            f"{F}.logprobs_from_logits, core_algos.get_policy_loss_fn({name!r})",
            f"[B, T, V], a tensor of temperatures [B], {mode}",
            _cure(name),
            f"loss_{name}",
        )(lambda name=name, mode=mode: _loss(name, mode))  # type: ignore[misc]


_register_losses()


def _penalty(kind: str) -> Made:
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
    from verl.utils.torch_functional import logprobs_from_logits

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        logp = logprobs_from_logits(hidden @ weight.T, ids)
        return agg_loss(kl_penalty(logp, ref, kind), mask, "seq-mean-token-sum-norm")

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.ref, b.mask.float())


def _register_penalties() -> None:
    for kind in PENALTIES:
        case(
            f"{F}.logprobs_from_logits, core_algos.kl_penalty(..., {kind!r}), agg_loss",
            "[B, T, V], seq-mean-token-sum-norm",
            "",
            f"kl_{kind.replace('+', '_plus')}",
        )(lambda kind=kind: _penalty(kind))  # type: ignore[misc]


_register_penalties()


def _with_entropy(entropy_of: str, dtype: torch.dtype, gradient: bool) -> Made:
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils import torch_functional

    entropy_from = getattr(torch_functional, entropy_of)

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor, temperature: Tensor) -> Any:
        logits = (hidden @ weight.T) / temperature.clamp(min=1e-8).to(hidden.dtype).unsqueeze(-1)
        if gradient:
            entropy = entropy_from(logits)
        else:
            with torch.no_grad():
                entropy = entropy_from(logits)
        logp = torch_functional.logprobs_from_logits(logits, ids)
        loss = (-(logp * advantages) * mask).sum() / mask.sum()
        bonus = agg_loss(entropy[None], mask[None], "token-mean")
        return loss - 0.01 * bonus if gradient else (loss, bonus)

    b = packed(dtype)
    temperature = torch.linspace(0.7, 1.3, b.ids.numel())
    return step, (b.hidden, b.weight, b.ids, b.advantages, b.mask.float(), temperature)


@case(
    f"{F}.entropy_from_logits, logprobs_from_logits, core_algos.agg_loss",
    "[N, V] packed: a loop over 15 tokens, a tensor of temperatures [N]; entropy with a gradient",
)
def entropy_bonus() -> Made:
    return _with_entropy("entropy_from_logits", torch.float32, True)


@case(
    f"{F}.entropy_from_logits, logprobs_from_logits, core_algos.agg_loss",
    "[N, V] packed, bfloat16: log_softmax in a loop over 15 tokens; entropy under no_grad",
)
def entropy_no_grad_bf16() -> Made:
    return _with_entropy("entropy_from_logits", torch.bfloat16, False)


@case(
    f"{F}.entropy_from_logits_with_chunking, logprobs_from_logits, core_algos.agg_loss",
    "[N, V] packed: entropies written into slices of a buffer, with a gradient",
)
def entropy_chunked() -> Made:
    return _with_entropy("entropy_from_logits_with_chunking", torch.float32, True)


@case(f"{F}.logprobs_from_logits_naive, core_algos.agg_loss", "[B, T, V] bfloat16")
def naive_bf16() -> Made:
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.torch_functional import logprobs_from_logits_naive

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = logprobs_from_logits_naive(hidden @ weight.T, ids)
        return agg_loss(-logp * advantages, mask, "seq-mean-token-sum")

    b = padded(torch.bfloat16)
    return step, (b.hidden, b.weight, b.ids, b.advantages, b.mask.float())


@case(f"{F}.log_probs_from_logits_response, core_algos.agg_loss", "logits of prompt and answer, the answer's are taken")
def response() -> Made:
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.torch_functional import log_probs_from_logits_response

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logp = log_probs_from_logits_response(ids, hidden @ weight.T, advantages.shape[1])
        return agg_loss(-logp * advantages, mask, "token-mean")

    b = padded(prompt=2)
    return step, (b.hidden, b.weight, b.ids, b.advantages, b.mask.float())


@case(f"{F}.calculate_sum_pi_squared_from_logits, logprobs_from_logits_naive", "both with gradients")
def sum_pi_squared() -> Made:
    from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits, logprobs_from_logits_naive

    def step(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logits = hidden @ weight.T
        terms = -logprobs_from_logits_naive(logits, ids) * advantages + calculate_sum_pi_squared_from_logits(logits)
        return (terms * mask).sum() / mask.sum()

    b = padded()
    return step, (b.hidden, b.weight, b.ids, b.advantages, b.mask.float())


# The engine: what FSDPEngineWithLMHead does with the logits of a model, on packed tokens -----------------------------

ENGINE = "verl.workers.engine.fsdp.FSDPEngineWithLMHead.prepare_model_outputs"


def _engine(entropy: bool, dtype: torch.dtype = torch.float32) -> Made:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    b = packed(dtype)
    nested = torch.nested.nested_tensor_from_jagged(b.ids, b.cu.long())
    micro_batch = TensorDict({"input_ids": nested}, batch_size=[b.cu.numel() - 1])
    tensordict_utils.assign_non_tensor(micro_batch, use_remove_padding=True, calculate_entropy=entropy)
    engine = SimpleNamespace(
        engine_config=SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False),
        compute_entropy_from_logits=entropy_from_logits,
        _gather_and_unpad_packed=lambda tensor, pad_size: tensor,
    )
    outputs_of = FSDPEngineWithLMHead.prepare_model_outputs

    def step(
        hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, temperature: Tensor
    ) -> Tensor:
        model_output = Output(logits=(hidden @ weight.T).unsqueeze(0))
        arguments = {"input_ids_rmpad_rolled": ids, "temperature_rmpad": temperature, "pad_size": 0}
        found = outputs_of(engine, model_output, arguments, micro_batch, None)
        loss = policy_loss(found["log_probs"].values(), old, advantages, mask)
        return loss - 0.01 * found["entropy"].values().mean() if entropy else loss

    temperature = torch.linspace(0.7, 1.3, b.ids.numel())
    return step, (b.hidden, b.weight, b.ids, b.old, b.advantages, b.mask.float(), temperature)


@case(ENGINE, "packed [1, N, V], a tensor of temperatures [N], log-probs as a jagged nested tensor")
def engine_jagged() -> Made:
    return _engine(entropy=False)


@case(ENGINE, "packed [1, N, V], a tensor of temperatures [N], log-probs and entropies as jagged nested tensors")
def engine_jagged_entropy() -> Made:
    return _engine(entropy=True)
