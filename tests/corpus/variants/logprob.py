"""Per-token log-probabilities: the plain spellings, shifts, temperatures, scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.variants.inputs import (
    f_bias,
    f_btv,
    f_ids,
    f_ids_keep,
    f_lab100,
    f_nv100,
    f_temp0d,
    f_temp_btok,
    f_temp_ntok,
)
from tests.corpus.variants.registry import variant


@variant(
    "LP01",
    "logp",
    [
        "OpenRLHF(old)",
        "Open-Reasoner-Zero",
        "oat",
        "ChatLearn",
        "trlx",
        "DeepSpeed-Chat",
        "align-anything",
        "ColossalChat",
        "verl-naive",
        "minimind-dpo",
    ],
    f_btv,
)
def lp01_log_softmax_gather_squeeze(hidden, weight, labels):
    """matmul -> F.log_softmax(dim=-1) -> gather(index=labels.unsqueeze(-1)) -> squeeze(-1); no cast."""
    logits = hidden @ weight.t()
    return F.log_softmax(logits, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


@variant("LP02", "logp", ["tiny-grpo", "NeMo-RL(non-parallel)", "oat-ppo", "ROLL"], f_ids)
def lp02_shift_logits_float(hidden, weight, input_ids):
    """linear -> logits[:, :-1] -> float32 -> log_softmax -> gather(input_ids[:, 1:])."""
    logits = F.linear(hidden, weight)[:, :-1].to(torch.float32)
    return torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)


@variant("LP03", "logp", ["reasoning-from-scratch", "NeMo-Aligner"], f_ids)
def lp03_slice_after_log_softmax(hidden, weight, input_ids):
    """full log_softmax first, the [:, :-1] shift is applied to the log-probs (so softmax covers an unused row)."""
    full = torch.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    full = full[:, :-1, :].contiguous()
    return torch.gather(full, 2, input_ids[:, 1:].unsqueeze(-1)).squeeze(dim=-1).contiguous()


@variant(
    "LP04",
    "seq",
    ["LLaMA-Factory", "axolotl-ORPO", "oat-DPO", "open-instruct-DPO", "torchtune", "TRL(old DPO)"],
    f_lab100,
)
def lp04_dpo_sum_with_ignore_labels(hidden, weight, labels):
    """labels cloned, -100 overwritten with 0 by mask, gather(dim=2).squeeze(2), mask-multiplied, summed per
    sequence."""
    logits = F.linear(hidden, weight)
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != -100
    labels[labels == -100] = 0
    tok = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (tok * mask).sum(-1)


@variant("LP06", "logp", ["TRL<1.16", "verl-v2", "SkyRL", "axolotl", "Megatron-LM RL", "ms-swift", "verifiers"], f_btv)
def lp06_gather_minus_rowloop_logsumexp(hidden, weight, labels):
    """fp32 branch of 'selective log-softmax': gather(logits) - stack([logsumexp(row) for row in logits])  (loop
    over B)."""
    logits = F.linear(hidden, weight).float()
    sel = torch.gather(logits, -1, labels.unsqueeze(-1))
    lse = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return (sel - lse.unsqueeze(-1)).squeeze(-1)


@variant(
    "LP07",
    "logp",
    ["TRL<1.16", "verl-v2", "SkyRL", "OpenRLHF(bf16)", "minimind", "simple_GRPO", "Megatron-LM RL"],
    f_btv,
)
def lp07_rowloop_log_softmax(hidden, weight, labels):
    """low-precision branch: python loop over batch rows, log_softmax + gather in the logits dtype, stack."""
    logits = F.linear(hidden, weight)
    out = []
    for row, lab in zip(logits, labels):
        out.append(F.log_softmax(row, dim=-1).gather(-1, lab.unsqueeze(-1)).squeeze(-1))
    return torch.stack(out)


@variant("LP09", "logp", ["unsloth-zoo", "PipelineRL", "ART"], f_ids)
def lp09_gather_minus_logsumexp(hidden, weight, input_ids, temperature=0.9):
    """shift, divide by python-float temperature out of place, gather(dim=2).squeeze(2) - logsumexp(-1); no loop."""
    logits = F.linear(hidden, weight)[:, :-1, :] / temperature
    sel = torch.gather(logits, dim=2, index=input_ids[:, 1:].unsqueeze(2)).squeeze(2)
    return sel - torch.logsumexp(logits, dim=-1)


@variant("LP10", "logp", ["OpenRLHF(no flash-attn)"], f_btv)
def lp10_chunked_lse_into_buffer(hidden, weight, labels, chunk=4):
    """fp32 logits, gather, logsumexp written chunk-by-chunk into a zeros buffer over flattened tokens, view back."""
    logits = F.linear(hidden, weight).to(torch.float32)
    shape, v = logits.shape[:-1], logits.shape[-1]
    sel = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
    flat = logits.reshape(-1, v)
    lse = torch.zeros(flat.shape[0], device=flat.device, dtype=flat.dtype)
    for s in range(0, flat.shape[0], chunk):
        e = min(s + chunk, flat.shape[0])
        lse[s:e] = torch.logsumexp(flat[s:e], dim=-1)
    return sel - lse.view(*shape)


@variant("LP11", "logp", ["torchforge"], f_ids_keep)
def lp11_neg_cross_entropy_align_temp_float(hidden, weight, input_ids, keep):
    """slice logits[:, -K-1:-1], divide by temperature in native dtype, THEN .float(), -F.cross_entropy(none),
    reshape."""
    tgt = input_ids[:, -keep:]
    logits = F.linear(hidden, weight)[:, -keep - 1 : -1, :] / 0.8
    logits = logits.float()
    b, t, v = logits.shape
    return (-F.cross_entropy(logits.reshape(-1, v), tgt.reshape(-1).long(), reduction="none")).reshape(b, t)


@variant("LP12", "logp", ["EasyR1", "torchtune GRPO losses"], f_btv)
def lp12_neg_cross_entropy_float_flat(hidden, weight, labels):
    """contiguous().view(-1,V) -> .float() -> -F.cross_entropy(reduction='none') -> view."""
    logits = F.linear(hidden, weight)
    out = -F.cross_entropy(
        logits.contiguous().view(-1, logits.shape[-1]).float(), labels.contiguous().view(-1), reduction="none"
    )
    return out.view(*labels.shape)


@variant("LP14", "logp", ["GRPO-Zero", "torchrl", "torchtitan-rl", "NeMo/others"], f_nv100)
def lp14_neg_cross_entropy_ignore_index(hidden, weight, labels):
    """packed tokens, fp32, -F.cross_entropy(none, ignore_index=-100): ignored rows come back exactly 0."""
    return -F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none", ignore_index=-100)


@variant("LP16", "logp", ["TRL<1.16", "ms-swift", "verl dp_actor", "EasyR1", "RLinf"], f_ids_keep, mutates=True)
def lp16_inplace_temperature_on_view(hidden, weight, input_ids, keep):
    """logits[:, :-1] then [:, -K:] are views; .div_(float) writes into them; then gather - row-loop logsumexp."""
    logits = F.linear(hidden, weight)
    logits = logits[:, :-1, :]
    logits = logits[:, -keep:, :]
    logits.div_(0.7)
    ids = input_ids[:, -keep:]
    sel = torch.gather(logits, -1, ids.unsqueeze(-1))
    lse = torch.stack([torch.logsumexp(r, dim=-1) for r in logits])
    return (sel - lse.unsqueeze(-1)).squeeze(-1)


@variant("LP17", "logp", ["verl (FSDP engine, packed)"], f_temp_ntok)
def lp17_temperature_tensor_packed_clamped(hidden, weight, labels, temperature):
    """logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)   temperature is [N] fp32."""
    logits = hidden @ weight.t()
    logits = logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)
    return F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP18", "logp", ["prime-rl (vanilla head)"], f_temp_btok)
def lp18_temperature_tensor_per_token(hidden, weight, labels, temperatures):
    """fp32 logits / temperatures.unsqueeze(-1) with [B,T] temperatures, then log_softmax-gather (compiled helper)."""
    logits = F.linear(hidden, weight).float().contiguous()
    scaled = logits / temperatures.unsqueeze(-1)
    return torch.gather(scaled.log_softmax(dim=-1), dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


@variant("LP20", "logp", ["generic (0-dim tensor temperature)"], f_temp0d, synthetic=True)
def lp20_temperature_zero_dim_tensor(hidden, weight, labels, temperature):
    """0-dim tensor temperature (does not specialise the graph the way a python float does)."""
    logits = (hidden @ weight.t()).float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP21", "logp", ["Liger chunked PPO base", "prime-rl fused head", "verl kernels"], f_btv)
def lp21_multiply_by_inverse_temperature(hidden, weight, labels, temperature=0.7):
    """logits.float() * (1/temperature) instead of a divide."""
    logits = (hidden @ weight.t()).float() * (1.0 / temperature)
    return torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


@variant("LP23", "logp", ["HF Cohere(logit_scale *)", "TRL/unsloth scale handling"], f_btv)
def lp23_logit_scale_multiply(hidden, weight, labels, scale=0.0625):
    """lm_head output multiplied by a model constant before the log-softmax."""
    logits = (F.linear(hidden, weight) * scale).float()
    return F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP24", "logp", ["HF Granite/MiniCPM (logits_scaling /)"], f_btv)
def lp24_logit_scale_divide(hidden, weight, labels, scaling=8.0):
    """lm_head output divided by a model constant before the log-softmax."""
    logits = (F.linear(hidden, weight) / scaling).float()
    return F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP25", "logp", ["Phi/GPT-J style heads", "Liger/TRL bias support", "AgileRL"], f_bias)
def lp25_bias(hidden, weight, labels, bias):
    """lm_head with bias: F.linear(h, w, b) -> addmm in aten."""
    logits = F.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP26", "logp", ["TRL cast_lm_head_to_fp32", "TRL SFT chunk", "AgileRL", "MiniMax-M1 recipe"], f_btv)
def lp26_fp32_head_matmul(hidden, weight, labels):
    """hidden.float() @ weight.float().t(): the upcast is BEFORE the projection."""
    logits = F.linear(hidden.to(torch.float32), weight.to(torch.float32))
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP27", "logp", ["HF logits_to_keep + TRL<1.16 / verifiers / minimind / unsloth"], f_ids_keep)
def lp27_logits_to_keep_slice_hidden(hidden, weight, input_ids, keep):
    """hidden[:, slice(-(K+1), None), :] -> lm_head -> [:, :-1] -> [:, -K:] -> /T -> gather - logsumexp."""
    logits = F.linear(hidden[:, slice(-(keep + 1), None), :], weight)
    logits = logits[:, :-1, :]
    logits = logits[:, -keep:] / 1.1
    ids = input_ids[:, -keep:]
    return torch.gather(logits, -1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)
