"""Sequence-level ratios: segment sums, a segment expression, back to tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.variants.common import _clip, _lp, _pk, _seqmean
from tests.corpus.variants.inputs import f_pk_cu, f_pk_lens, f_pk_pos, f_pk_seg, f_rl, f_rl_ref, f_rl_tok, f_turn
from tests.corpus.variants.registry import variant


@variant(
    "GSPO01", "loss", ["TRL sequence", "Liger", "unsloth", "ms-swift sequence", "ROLL seq", "AgileRL trajectory"], f_rl
)
def gspo01_masked_mean_broadcast(hidden, weight, labels, old, adv, mask):
    """[B,T] masked mean -> unsqueeze(-1) -> exp: ratio stays [B,1] and broadcasts; per-sequence mean."""
    lr = _lp(hidden, weight, labels) - old
    lw = ((lr * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return _seqmean(_clip(torch.exp(lw), adv[:, None], 3e-4, 4e-4), mask)


@variant("GSPO02", "loss", ["verl gspo", "SkyRL gspo (clamp max 10)"], f_rl_tok)
def gspo02_stop_gradient_clamped(hidden, weight, labels, old, adv, mask):
    """log s = logp - logp.detach() + mean.detach().unsqueeze(-1); clamp(max=10); exp; maximum; seq-mean-token-mean."""
    lp = _lp(hidden, weight, labels)
    k = lp - old
    n = torch.sum(mask, dim=-1).clamp(min=1)
    ks = torch.sum(k * mask, dim=-1) / n
    r = torch.exp(torch.clamp(lp - lp.detach() + ks.detach().unsqueeze(-1), max=10.0))
    loss = torch.maximum(-adv * r, -adv * torch.clamp(r, 1 - 3e-4, 1 + 4e-4))
    return (torch.sum(loss * mask, -1) / (torch.sum(mask, -1) + 1e-8)).mean()


@variant("GSPO04", "loss", ["OpenRLHF gspo", "EasyR1 gspo"], f_rl_tok)
def gspo04_ratio_times_mask(hidden, weight, labels, old, adv, mask):
    """exp(mean).unsqueeze(-1) * mask -> full [B,T] ratio that is exactly 0 off-mask; aggregate per sequence."""
    m = mask.float()
    lr = _lp(hidden, weight, labels) - old
    r = ((lr * m).sum(-1) / m.sum(-1).clamp(min=1)).exp().unsqueeze(-1) * m
    loss = -torch.min(r * adv, r.clamp(0.8, 1.2) * adv)
    s = (loss * m).sum(-1) / (m.sum(-1) + 1e-8)
    ok = (m.sum(-1) > 0).float()
    return (s * ok).sum() / ok.sum()


@variant("GSPO06", "loss", ["AReaL (1D packed)"], f_pk_cu)
def gspo06_scatter_add_cu_seqlens(hidden, weight, labels, old, adv, mask, cu):
    """diff(cu) -> arange(B).repeat_interleave(lengths) -> scatter_add_ x3 (log-ratio, adv, int32 count) -> exp -> [idx]
    gather -> where."""
    lr = _pk(hidden, weight, labels) - old
    nb = cu.shape[0] - 1
    idx = torch.arange(nb, device=lr.device).repeat_interleave(cu[1:] - cu[:-1], output_size=lr.shape[0])
    sm = torch.zeros(nb, device=lr.device, dtype=lr.dtype).scatter_add_(0, idx, torch.where(mask, lr, 0.0))
    sa = torch.zeros(nb, device=lr.device, dtype=adv.dtype).scatter_add_(0, idx, torch.where(mask, adv, 0.0))
    n = torch.zeros(nb, device=lr.device, dtype=torch.int32).scatter_add_(0, idx, mask.int()).clamp(min=1)
    r = torch.where(mask, torch.exp(sm / n.to(lr.dtype))[idx], 0.0)
    a = torch.where(mask, (sa / n.to(adv.dtype))[idx], 0.0)
    loss = torch.max(-a * r, -a * torch.clamp(r, 0.8, 1.2))
    return torch.where(mask, loss, 0).sum() / mask.count_nonzero()


@variant("GSPO07", "loss", ["AReaL (2D)"], f_rl_tok)
def gspo07_where_sum_expand_as(hidden, weight, labels, old, adv, mask):
    """where(mask, lr, 0).sum(1) / count.clamp(min=1) -> unsqueeze(1).expand_as -> exp over the EXPANDED tensor ->
    where."""
    lr = _lp(hidden, weight, labels) - old
    mean = torch.where(mask, lr, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    r = torch.where(mask, torch.exp(mean.unsqueeze(1).expand_as(lr)), 0.0)
    loss = torch.max(-adv * r, -adv * torch.clamp(r, 0.8, 1.2))
    return torch.where(mask, loss, 0).sum() / mask.count_nonzero()


@variant("GSPO09", "loss", ["Fast-LLM"], f_pk_seg)
def gspo09_index_add_python_int_segments(hidden, weight, labels, old, adv, mask, seg, num_segments):
    """per-token weight mask/N_d; new_zeros(num_segments).index_add_(0, doc, lr*w) (python int size); exp; gather to
    tokens; clip."""
    lp = _pk(hidden, weight, labels)
    cnt = torch.zeros(num_segments, device=lp.device).index_add_(0, seg, mask.float())[seg]
    wgt = mask.reshape(-1).to(lp.dtype) / cnt.clamp(min=1)
    lr = (lp - old).reshape(-1)
    sr = (lr * wgt).new_zeros(num_segments).index_add_(0, seg, lr * wgt)
    sa = adv.new_zeros(num_segments).index_add_(0, seg, adv * wgt)
    r = sr.exp()[seg].reshape(lp.shape)
    a = sa.detach()[seg].reshape(lp.shape)
    return (_clip(r, a) * mask.to(lp.dtype)).sum() / 3.0


@variant("GSPO10", "loss", ["slime", "miles", "NeMo-Aligner DPO (split)"], f_pk_lens)
def gspo10_python_list_of_samples(hidden, weight, labels, old, adv, mask, lengths):
    """per-sample lists: ((old - lp)*m).sum()/clamp_min(m.sum(),1) -> expand_as -> cat -> (-kl).exp(); per-sample means
    summed."""
    lp = _pk(hidden, weight, labels)
    m = mask.to(lp.dtype)
    parts = [
        ((o - x) * w).sum() / torch.clamp_min(w.sum(), 1)
        for x, o, w in zip(lp.split(lengths), old.split(lengths), m.split(lengths))
    ]
    kl = torch.cat([k.expand_as(x) for k, x in zip(parts, lp.split(lengths))], dim=0)
    r = (-kl).exp()
    pg = torch.maximum(-r * adv, -r.clamp(1 - 3e-4, 1 + 4e-4) * adv)
    return sum((x * w).sum() / torch.clamp_min(w.sum(), 1) for x, w in zip(pg.split(lengths), m.split(lengths)))


@variant("GSPO11", "loss", ["SkyRL"], f_rl_tok)
def gspo11_stop_gradient_sum_reduction(hidden, weight, labels, old, adv, mask):
    """masked_mean(dim=-1) + detached; clamp(max=10); plain masked SUM (normalisation already folded into
    advantages)."""
    m = mask.float()
    lp = _lp(hidden, weight, labels)
    s = (((lp - old) * m).sum(-1) / m.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    r = torch.exp(torch.clamp(lp - lp.detach() + s.detach(), max=10))
    return (-torch.min(r * adv, r.clamp(0.8, 1.2) * adv) * m).sum()


@variant("GSPO13", "loss", ["AgileRL turn level"], f_turn)
def gspo13_turn_scatter_add_2d(hidden, weight, labels, old, adv, mask, turn_ids, num_turns):
    """2D scatter_add(1, turn_ids.clamp(min=0), lr*mask) -> per-turn mean [B,num_turns] -> exp -> clip at TURN level ->
    masked mean."""
    lr = _lp(hidden, weight, labels) - old
    tid = turn_ids.clamp(min=0)
    z = torch.zeros(lr.shape[0], num_turns, dtype=lr.dtype, device=lr.device)
    s = z.scatter_add(1, tid, lr * mask)
    n = torch.zeros_like(z).scatter_add(1, tid, mask)
    r = torch.exp(s / n.clamp(min=1.0))
    u = torch.max(-adv[:, None] * r, -adv[:, None] * torch.clamp(r, 0.8, 1.2))
    act = (n > 0).to(r.dtype)
    return (u * act).sum() / act.sum().clamp(min=1.0)


@variant("GSPO16", "loss", ["HF/TRL padding-free, PipelineRL (position_ids==0)"], f_pk_pos)
def gspo16_position_ids_cumsum_segments(hidden, weight, labels, old, adv, mask, position_ids):
    """segment ids = cumsum(position_ids == 0) - 1, buffer sized by N (static upper bound), index_add, exp, gather."""
    lr = _pk(hidden, weight, labels) - old
    seg = torch.cumsum(position_ids == 0, 0) - 1
    m = mask.to(lr.dtype)
    z = torch.zeros(lr.shape[0], dtype=lr.dtype, device=lr.device)
    mean = z.index_add(0, seg, lr * m) / z.index_add(0, seg, m).clamp(min=1.0)
    return (_clip(mean.exp()[seg], adv) * m).sum() / m.sum()


@variant("GSPO18", "loss", ["AReaL packed DPO (fp64 index_add)", "verl groupwise stats"], f_pk_cu)
def gspo18_fp64_index_add(hidden, weight, labels, old, adv, mask, cu):
    """repeat_interleave ids, fp64 zeros .index_add_(0, ids, (lr*m).double()), result cast back."""
    lr = _pk(hidden, weight, labels) - old
    n = cu.shape[0] - 1
    seg = torch.repeat_interleave(torch.arange(n, device=lr.device), cu[1:] - cu[:-1], output_size=lr.shape[0])
    m = mask.to(lr.dtype)
    s = torch.zeros(n, dtype=torch.float64, device=lr.device).index_add_(0, seg, (lr * m).double())
    c = torch.zeros(n, dtype=torch.float64, device=lr.device).index_add_(0, seg, m.double())
    r = torch.exp(s / c.clamp(min=1)).float()
    return (_clip(r[seg], adv) * m).sum() / m.sum()


@variant("GSPO19", "loss", ["none found in losses (RLinf uses segment_reduce elsewhere)"], f_pk_lens, synthetic=True)
def gspo19_segment_reduce(hidden, weight, labels, old, adv, mask, lengths):
    """torch.segment_reduce(x, 'sum', lengths=...) for sums and counts."""
    lr = _pk(hidden, weight, labels) - old
    m = mask.to(lr.dtype)
    ln = torch.tensor(lengths, device=lr.device)
    s = torch.segment_reduce(lr * m, "sum", lengths=ln)
    c = torch.segment_reduce(m, "sum", lengths=ln)
    r = torch.repeat_interleave(torch.exp(s / c.clamp(min=1.0)), ln, output_size=lr.shape[0])
    return (_clip(r, adv) * m).sum() / m.sum()


@variant("GSPO21", "loss", ["none found (vectorised alternative)"], f_pk_cu, synthetic=True)
def gspo21_cumsum_difference(hidden, weight, labels, old, adv, mask, cu):
    """prefix-sum differences at cu_seqlens: S = pad(cumsum(x)); sums = S[cu[1:]] - S[cu[:-1]]."""
    lr = _pk(hidden, weight, labels) - old
    m = mask.to(lr.dtype)
    S, C = F.pad(torch.cumsum(lr * m, 0), (1, 0)), F.pad(torch.cumsum(m, 0), (1, 0))
    mean = (S[cu[1:]] - S[cu[:-1]]) / (C[cu[1:]] - C[cu[:-1]]).clamp(min=1.0)
    r = torch.repeat_interleave(mean.exp(), cu[1:] - cu[:-1], output_size=lr.shape[0])
    return (_clip(r, adv) * m).sum() / m.sum()


@variant("GSPO22", "loss", ["none found (matmul formulation)"], f_pk_seg, synthetic=True)
def gspo22_one_hot_matmul(hidden, weight, labels, old, adv, mask, seg, num_segments):
    """segment sums as one_hot(seg).T @ x."""
    lr = _pk(hidden, weight, labels) - old
    m = mask.to(lr.dtype)
    oh = F.one_hot(seg, num_segments).to(lr.dtype)
    mean = (oh.t() @ (lr * m)) / (oh.t() @ m).clamp(min=1.0)
    return (_clip(oh @ mean.exp(), adv) * m).sum() / m.sum()


@variant("GSPO24", "loss", ["torchtune GRPOCompletionLoss"], f_rl_ref)
def gspo24_summed_not_averaged(hidden, weight, labels, old, adv, mask, ref):
    """sequence SUMS of log-probs (no length normalisation): exp(sum lp - sum old); k3 on sums; batch mean."""
    lp = (_lp(hidden, weight, labels) * mask).sum(-1)
    r = torch.exp(lp - (old * mask).sum(-1))
    d = (ref * mask).sum(-1) - lp
    return -(torch.minimum(adv * r.clamp(0.9, 1.1), adv * r).mean() - 0.1 * (torch.exp(d) - d - 1).mean())


@variant(
    "GSPO25", "loss", ["NeMo-RL packed wrapper + GSPO", "ms-swift padding-free (unpad then 2D)"], f_pk_cu, dynamic=True
)
def gspo25_per_sequence_slices(hidden, weight, labels, old, adv, mask, cu):
    """python loop over cu_seqlens slices with .item(); each slice: mean -> exp -> clip -> masked mean; accumulate."""
    lp = _pk(hidden, weight, labels)
    tot = lp.new_zeros(())
    for i in range(cu.numel() - 1):
        s, e = cu[i].item(), cu[i + 1].item()
        m = mask[s:e].to(lp.dtype)
        r = (((lp[s:e] - old[s:e]) * m).sum() / (m.sum() + 1e-8)).exp()
        tot = tot + (_clip(r, adv[s:e]) * m).sum() / (m.sum() + 1e-8)
    return tot / (cu.numel() - 1)
