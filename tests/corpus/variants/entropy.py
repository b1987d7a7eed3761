"""Entropy alone, and log-probability with entropy from the same logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.variants.inputs import f_btv, f_ids_keep, f_nv, f_ref, f_rl, f_temp_btok, f_temp_ntok
from tests.corpus.variants.registry import variant


@variant(
    "ENT01",
    "ent",
    ["verl", "OpenRLHF(@torch.compile)", "open-instruct", "ROLL", "oat", "ChatLearn", "ColossalChat", "GRPO-Zero"],
    f_btv,
)
def ent01_lse_minus_sum_p_logits(hidden, weight, labels):
    """pd = softmax(logits); logsumexp(logits) - sum(pd * logits)."""
    lg = F.linear(hidden, weight).float()
    pd = F.softmax(lg, dim=-1)
    return torch.logsumexp(lg, dim=-1) - torch.sum(pd * lg, dim=-1)


@variant("ENT02", "ent", ["verl entropy_from_logits_with_chunking", "ChatLearn", "SkyRL"], f_nv)
def ent02_chunked_into_buffer(hidden, weight, labels, chunk=5):
    """zeros buffer; per chunk .float(), ENT01, slice assign."""
    lg = hidden @ weight.t()
    out = torch.zeros(lg.shape[0], device=lg.device)
    for i in range(0, lg.shape[0], chunk):
        c = lg[i : i + chunk].float()
        out[i : i + chunk] = torch.logsumexp(c, -1) - torch.sum(F.softmax(c, -1) * c, -1)
    return out


@variant("ENT04", "ent", ["PipelineRL (entropy loss on)"], f_btv)
def ent04_logits_minus_lse_exp(hidden, weight, labels):
    """logprobs = logits - logsumexp.unsqueeze(-1); probs = exp; -(probs*logprobs).sum."""
    lg = F.linear(hidden, weight) / 0.9
    lp = lg - torch.logsumexp(lg, -1).unsqueeze(-1)
    return -(torch.exp(lp) * lp).sum(dim=-1)


@variant("ENT05", "ent", ["PipelineRL (metrics only)"], f_btv, grad=False)
def ent05_no_grad_vocab_chunk_accumulate(hidden, weight, labels, vchunk=16):
    """no_grad loop over VOCAB slices of detached logits: entropy -= (exp(c-lse)*(c-lse)).sum(-1)."""
    lg = F.linear(hidden, weight)
    lse = torch.logsumexp(lg, -1)
    ent = torch.zeros_like(lse)
    with torch.no_grad():
        d, z = lg.detach(), lse.detach().unsqueeze(-1)
        for s in range(0, d.shape[-1], vchunk):
            c = d[..., s : s + vchunk] - z
            ent = ent - (torch.exp(c) * c).sum(dim=-1)
    return ent


@variant("ENT07", "ent", ["Fast-LLM"], f_nv)
def ent07_from_shared_softmax_stats(hidden, weight, labels):
    """log(sum exp) - sum(exp * shifted) / sum exp from max-shifted logits."""
    lg = (hidden @ weight.t()).float()
    nrm = lg - lg.max(dim=-1)[0].unsqueeze(-1)
    e = nrm.exp()
    s = e.sum(-1)
    return s.log() - (e * nrm).sum(-1) / s


@variant("ENT09", "ent", ["verl entropy_checkpointing"], f_btv)
def ent09_checkpointed(hidden, weight, labels):
    """ENT01 wrapped in torch.utils.checkpoint over the logits."""

    def f(x):
        return torch.logsumexp(x, -1) - torch.sum(F.softmax(x, -1) * x, -1)

    return checkpoint(f, F.linear(hidden, weight).float(), use_reentrant=False)


@variant("ENT10", "ent", ["torchrl", "RL toy code"], f_btv)
def ent10_categorical_entropy(hidden, weight, labels):
    """Categorical(logits).entropy(): normalised logits clamped at finfo.min, -(logits*probs).sum(-1)."""
    return torch.distributions.Categorical(logits=F.linear(hidden, weight).float(), validate_args=False).entropy()


@variant("ENT11", "ent", ["Megatron-LM RL (per-token term)", "nano-aha-moment / EasyR1 / xtuner (metrics)"], f_btv)
def ent11_sampled_surrogate(hidden, weight, labels):
    """no vocab reduction: -exp(logp)*logp of the sampled token only."""
    lp = F.log_softmax(F.linear(hidden, weight).float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -lp.exp() * lp


@variant("LPE01", "logp+ent", ["TRL<1.16", "ms-swift"], f_ids_keep, mutates=True)
def lpe01_trl_style_nograd_entropy(hidden, weight, input_ids, keep):
    """views + div_ + gather/row-loop-lse with grad; entropy (split, log_softmax) under no_grad on the same logits."""
    lg = F.linear(hidden[:, -(keep + 1) :, :], weight)[:, :-1, :]
    lg.div_(0.9)
    ids = input_ids[:, -keep:]
    lp = torch.gather(lg, -1, ids.unsqueeze(-1)).squeeze(-1) - torch.stack([torch.logsumexp(r, -1) for r in lg])
    with torch.no_grad():
        es = []
        for c in lg.reshape(-1, lg.shape[-1]).split(4):
            q = F.log_softmax(c, -1)
            es.append(-(torch.exp(q) * q).sum(-1))
        ent = torch.cat(es).reshape(ids.shape)
    return lp, ent


@variant("LPE02", "logp+ent", ["verl (entropy_coeff != 0)", "SkyRL", "OpenRLHF"], f_temp_ntok)
def lpe02_verl_style_grad_entropy(hidden, weight, labels, temperature):
    """packed, tensor temperature, entropy ENT01 WITH grad, then logp from the same scaled logits."""
    lg = hidden @ weight.t()
    lg = lg / temperature.clamp(min=1e-8).unsqueeze(-1).to(lg.dtype)
    ent = torch.logsumexp(lg, -1) - torch.sum(F.softmax(lg, -1) * lg, -1)
    lp = F.log_softmax(lg, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return lp, ent


@variant("LPE04", "logp+ent", ["verl FusedLinearForPPO (its chunk body)", "VeOmni", "oat FusedLinear"], f_nv)
def lpe04_fused_linear_chunk_body(hidden, weight, labels, temperature=0.7):
    """(h @ w.t()) / T in native dtype -> float32 -> softmax/logsumexp entropy (cast BACK to native) + log_softmax-
    gather (fp32)."""
    lg = (hidden @ weight.t()) / temperature
    od = lg.dtype
    lg = lg.to(torch.float32)
    p = lg.softmax(dim=-1)
    ent = torch.logsumexp(lg, -1) - torch.sum(p * lg, -1)
    lp = lg.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return lp, ent.to(od)


@variant("LPE06", "logp+ent", ["prime-rl", "open-instruct"], f_temp_btok)
def lpe06_logsoftmax_gather_plus_nograd_entropy(hidden, weight, labels, temperatures):
    """two separately compiled helpers on the same scaled fp32 logits (log_softmax-gather with grad, ENT01 no_grad)."""
    lg = F.linear(hidden, weight).float() / temperatures.unsqueeze(-1)
    lp = torch.gather(lg.log_softmax(-1), -1, labels.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        ent = torch.logsumexp(lg, -1) - torch.sum(F.softmax(lg, -1) * lg, -1)
    return lp, ent


@variant("LPE07", "loss", ["TRL entropy_coef", "verl entropy_coeff", "slime", "ROLL", "OpenRLHF"], f_rl)
def lpe07_entropy_bonus_loss(hidden, weight, labels, old, adv, mask, coef=0.01):
    """clipped surrogate + entropy bonus, both through the same log_softmax."""
    lg = F.linear(hidden, weight).float()
    lsm = F.log_softmax(lg, -1)
    lp = lsm.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ent = -(lsm.exp() * lsm).sum(-1)
    r = torch.exp(lp - old)
    pg = -torch.min(r * adv[:, None], r.clamp(0.8, 1.2) * adv[:, None])
    return (pg * mask).sum() / mask.sum() - coef * (ent * mask).sum() / mask.sum()


@variant("REF01", "loss", ["ART", "verifiers", "align-anything", "simple_GRPO(remote ref)"], f_ref)
def ref01_policy_and_reference_in_one_graph(hidden, weight, labels, ref_hidden, ref_weight, mask):
    """policy head with grad and reference head under no_grad in the same graph, k3 KL between the two."""
    lp = F.log_softmax(F.linear(hidden, weight).float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        rp = F.log_softmax(F.linear(ref_hidden, ref_weight).float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    kl = torch.exp(rp - lp) - (rp - lp) - 1
    return (kl * mask).sum() / mask.sum()
