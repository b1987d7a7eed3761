"""Policy losses behind one head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.corpus.variants.common import _clip, _lp, _pk, _seqmean
from tests.corpus.variants.inputs import f_dpo, f_pk_seg, f_rl, f_rl_ref, f_rl_tok
from tests.corpus.variants.logprob import lp04_dpo_sum_with_ignore_labels
from tests.corpus.variants.registry import variant


@variant("GRPO01", "loss", ["TRL loss_type=grpo", "unsloth", "Liger", "ms-swift", "verifiers"], f_rl_ref)
def grpo01_seqmean_k3(hidden, weight, labels, old, adv, mask, ref, beta=0.04):
    """token ratio, min(unclipped, clipped), + beta*k3, per-sequence masked mean then batch mean."""
    lp = _lp(hidden, weight, labels)
    loss = _clip(torch.exp(lp - old), adv[:, None])
    kl = torch.exp(ref - lp) - (ref - lp) - 1
    return _seqmean(loss + beta * kl, mask)


@variant("GRPO02", "loss", ["TRL bnpo", "OpenRLHF token-level", "EasyR1 token", "verl token-mean"], f_rl)
def grpo02_token_mean(hidden, weight, labels, old, adv, mask):
    """global masked token mean (bnpo / token-mean / DAPO on one rank)."""
    loss = _clip(torch.exp(_lp(hidden, weight, labels) - old), adv[:, None])
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)


@variant("GRPO03", "loss", ["TRL dr_grpo", "verl seq-mean-token-sum-norm", "understand-r1-zero"], f_rl)
def grpo03_constant_denominator(hidden, weight, labels, old, adv, mask, max_len=64):
    """Dr.GRPO: sum over tokens / (B * max_completion_length)."""
    loss = _clip(torch.exp(_lp(hidden, weight, labels) - old), adv[:, None])
    return (loss * mask).sum() / (loss.size(0) * max_len)


@variant("GRPO05", "loss", ["verl vanilla", "SkyRL dual_clip", "ROLL", "slime", "xtuner", "EasyR1"], f_rl_tok)
def grpo05_clamped_logratio_dual_clip(hidden, weight, labels, old, adv, mask, c=3.0):
    """log-ratio clamped to +-20; dual clip through where(adv < 0, min(c*-adv, max(l1, l2)), max(l1, l2)); seq-mean-
    token-mean."""
    k = torch.clamp(_lp(hidden, weight, labels) - old, min=-20.0, max=20.0)
    r = torch.exp(k)
    l1 = -adv * r
    l2 = -adv * torch.clamp(r, 0.8, 1.28)
    hi = torch.maximum(l1, l2)
    lo = torch.min(-adv * c, hi)
    pg = torch.where(adv < 0, lo, hi)
    n = torch.sum(mask, -1)
    seq = torch.sum(pg * mask, dim=-1) / (n + 1e-8)
    ok = (n > 0).float()
    return (torch.where(ok.bool(), seq, 0.0) * ok).sum() / ok.sum()


@variant("GRPO06", "loss", ["simple_GRPO", "torchtune GRPOSimple/Linear", "torchforge"], f_rl_ref)
def grpo06_on_policy_exp_detach(hidden, weight, labels, old, adv, mask, ref):
    """no old log-probs: exp(logp - logp.detach()) * A - beta*k3(ref.detach())."""
    lp = _lp(hidden, weight, labels)
    kl = torch.exp(ref.detach() - lp) - (ref.detach() - lp) - 1
    tok = -(torch.exp(lp - lp.detach()) * adv[:, None] - 0.04 * kl)
    return ((tok * mask).sum(1) / mask.sum(1).clamp(min=1.0)).mean()


@variant("GRPO08", "loss", ["AReaL", "RLinf"], f_rl_tok)
def grpo08_where_masked_ratio(hidden, weight, labels, old, adv, mask):
    """ratio = where(mask, exp(lp - old), 0); sign(adv)*c*adv dual clip; where(mask, loss, 0).sum()/count_nonzero."""
    r = torch.where(mask, torch.exp(_lp(hidden, weight, labels) - old), 0)
    loss = torch.max(-adv * r, -adv * torch.clamp(r, 0.8, 1.2))
    loss = torch.min(loss, torch.sign(adv) * 3.0 * adv)
    return torch.where(mask, loss, 0).sum() / mask.count_nonzero()


@variant("GRPO11", "loss", ["PipelineRL", "xtuner", "Fast-LLM", "ART"], f_pk_seg)
def grpo11_packed_token_weights(hidden, weight, labels, old, adv, mask, seg, nseg):
    """packed tokens, per-token weights 1/N_seg gathered from counts, weighted sum (no per-sequence loop)."""
    lp = _pk(hidden, weight, labels)
    cnt = torch.zeros(nseg, device=lp.device).index_add_(0, seg, mask.float())
    wt = mask.float() / cnt.clamp(min=1)[seg]
    return (_clip(torch.exp(lp - old), adv) * wt).sum() / nseg


@variant("GRPO13", "loss", ["torchtune LinearGRPOLoss", "xtuner chunk mode", "torchtitan ChunkedLossWrapper"], f_rl_ref)
def grpo13_chunked_head_and_loss(hidden, weight, labels, old, adv, mask, ref, chunks=3):
    """hidden.tensor_split(chunks, dim=1): head + loss per chunk, per-row running sums, final division by token
    count."""
    tot = torch.zeros(hidden.shape[0], device=hidden.device)
    cnt = torch.zeros_like(tot)
    for h, y, rf, m in zip(*(x.tensor_split(chunks, dim=1) for x in (hidden, labels, ref, mask))):
        lg = F.linear(h, weight)
        lp = (-F.cross_entropy(lg.reshape(-1, lg.size(-1)).float(), y.reshape(-1), reduction="none")).view_as(y)
        kl = torch.exp(rf - lp) - (rf - lp) - 1
        tok = -(torch.exp(lp - lp.detach()) * adv[:, None] - 0.1 * kl)
        tot = tot + (tok * m).sum(dim=1)
        cnt = cnt + m.sum(dim=1)
    return (tot / cnt.clamp(min=1e-9)).mean()


@variant(
    "CISPO01",
    "loss",
    ["TRL", "verl", "slime", "SkyRL", "NeMo-RL", "open-instruct", "EasyR1", "AgileRL", "ROLL", "unsloth"],
    f_rl,
)
def cispo01(hidden, weight, labels, old, adv, mask, hi=2.0):
    """-sg(clamp(ratio, max)) * A * logp: the ratio is detached so only logp carries gradient."""
    lp = _lp(hidden, weight, labels)
    w = torch.clamp(torch.exp(lp - old), max=hi).detach()
    return (-w * adv[:, None] * lp * mask).sum() / mask.sum()


@variant("SAPO01", "loss", ["TRL", "verl", "SkyRL", "AReaL", "EasyR1", "ms-swift", "Liger"], f_rl)
def sapo01(hidden, weight, labels, old, adv, mask, tp=1.0, tn=1.05):
    """sigmoid(tau*(r-1))*4/tau soft gate with advantage-sign dependent tau."""
    r = torch.exp(_lp(hidden, weight, labels) - old)
    tau = torch.where(adv[:, None] > 0, tp, tn)
    return _seqmean(-torch.sigmoid(tau * (r - 1)) * 4 / tau * adv[:, None], mask)


@variant("VESPO01", "loss", ["TRL", "unsloth", "Liger"], f_rl)
def vespo01(hidden, weight, labels, old, adv, mask):
    """no_grad sequence weight phi = exp(lam + k*logw - lam*w), logw = SUM of clamped log-ratios; loss = -phi*A*logp."""
    lp = _lp(hidden, weight, labels)
    with torch.no_grad():
        lw = torch.clamp((torch.clamp(lp - old, -20.0, 20.0) * mask).sum(-1, keepdim=True), math.log(1e-8), 20.0)
        pos = adv[:, None] >= 0
        k = torch.where(pos, 2.0, 3.0)
        lam = torch.where(pos, 3.0, 2.0)
        phi = torch.exp(lam + k * lw - lam * torch.exp(lw)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return (-phi * adv[:, None] * lp * mask).sum() / mask.sum()


@variant("LUSPO01", "loss", ["TRL", "Liger", "unsloth"], f_rl)
def luspo01(hidden, weight, labels, old, adv, mask):
    """GSPO ratio [B,1], sequence loss multiplied by its own length."""
    lr = _lp(hidden, weight, labels) - old
    r = torch.exp(((lr * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1))
    return (_clip(r, adv[:, None]) * mask).sum(-1).mean()


@variant("DRO01", "loss", ["verl dro", "Kimi-k1.5 loss in ROLL"], f_rl_tok)
def dro01(hidden, weight, labels, old, adv, mask, beta=0.1):
    """-(logp*A - 0.5*beta*(logp-old)^2)."""
    lp = _lp(hidden, weight, labels)
    return (-(lp * adv - 0.5 * beta * (lp - old).square()) * mask).sum() / mask.sum()


@variant("PG01", "loss", ["verl gpg", "GRPO-Zero", "nano-aha-moment", "ROLL vanilla", "oat reinforce"], f_rl)
def pg01_reinforce(hidden, weight, labels, old, adv, mask):
    """-logp * A, no ratio."""
    return (-_lp(hidden, weight, labels) * adv[:, None] * mask).sum() / mask.sum()


@variant("PG02", "loss", ["torchforge ReinforceLoss", "ROLL TIS/TOPR", "PipelineRL reinforce"], f_rl)
def pg02_detached_clamped_is(hidden, weight, labels, old, adv, mask):
    """-logp * A * clamp(exp(logp - old).detach(), lo, hi)."""
    lp = _lp(hidden, weight, labels)
    w = torch.clamp(torch.exp(lp - old).detach(), min=0.1, max=10.0)
    return (-lp * adv[:, None] * w * mask).sum() / torch.maximum(mask.sum(), torch.ones_like(mask.sum()))


@variant(
    "IS01",
    "loss",
    ["slime tis/icepop", "OpenRLHF", "NeMo-RL", "SkyRL", "TRL vllm IS", "verl rollout correction"],
    f_rl_ref,
)
def is01_rollout_correction_tis_icepop(hidden, weight, labels, old, adv, mask, rollout):
    """detached exp(old - rollout): truncated (tis) and zero-outside-band (icepop), sequence-mean band mask; multiplies
    token loss."""
    loss = _clip(torch.exp(_lp(hidden, weight, labels) - old), adv[:, None])
    lr = old - rollout
    w = torch.exp(lr).detach()
    ice = torch.where((w >= 0.5) & (w <= 2.0), w, torch.zeros_like(w))
    seq = torch.exp((lr * mask).sum(-1) / mask.sum(-1).clamp(min=1))
    ok = ((seq >= 0.2) & (seq <= 5.0)).float().unsqueeze(-1)
    return (loss * ice * ok * mask).sum() / mask.sum()


@variant("COV01", "loss", ["verl clip_cov", "SkyRL clip_cov"], f_rl_tok, dynamic=True)
def cov01_clip_cov(hidden, weight, labels, old, adv, mask):
    """covariance of adv and logp, in-band token indices by nonzero(), their loss zeroed by index assignment."""
    lp = _lp(hidden, weight, labels)
    r = torch.exp(lp - old)
    l1, l2 = -adv * r, -adv * torch.clamp(r, 0.8, 1.2)
    m = mask.float()
    cov = (adv - (adv * m).sum() / m.sum()) * (lp - (lp.detach() * m).sum() / m.sum())
    cov[mask == 0] = -torch.inf
    idx = torch.nonzero((cov < 5.0) & (cov > 0.1) & mask)
    corr = torch.ones_like(adv)
    corr[idx[:2, 0], idx[:2, 1]] = 0
    return (torch.maximum(l1, l2) * corr * m).sum() / m.sum()


@variant("SFT01", "loss", ["OpenRLHF SFTLoss", "verl sft_loss", "SkyRL cross_entropy", "prime-rl ce"], f_rl_tok)
def sft01_masked_nll(hidden, weight, labels, old, adv, mask):
    """-masked_sum(logp)/tokens with where(mask, x, 0)*mask (NaN-safe masked sum)."""
    lp = _lp(hidden, weight, labels)
    return -(torch.where(mask, lp, 0.0) * mask).sum() / mask.sum()


@variant("DPO01", "loss", ["TRL DPO", "LLaMA-Factory", "oat", "torchtune", "open-instruct", "OpenRLHF"], f_dpo)
def dpo01(hidden, weight, labels, ref_seq):
    """concatenated chosen/rejected: sequence-summed log-probs -> pairwise logsigmoid."""
    seq = lp04_dpo_sum_with_ignore_labels(hidden, weight, labels)
    n = seq.shape[0] // 2
    d = (seq[:n] - ref_seq[:n]) - (seq[n:] - ref_seq[n:])
    return -F.logsigmoid(0.1 * d).mean()
