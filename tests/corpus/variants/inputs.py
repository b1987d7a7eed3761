"""Input factories: ``f_x(device, dtype, small) -> args``, always hidden and weight first, both leaves."""

from __future__ import annotations

import math

import torch


def _dims(small):
    return dict(B=2, T=7, H=16, V=41) if small else dict(B=2, T=256, H=512, V=32000)


def _gen(device, seed=0):
    return torch.Generator(device="cpu").manual_seed(seed)


def _hw(device, dtype, small, flat=False, grad=True, seed=0):
    d = _dims(small)
    g = _gen(device, seed)
    n = (d["B"] * d["T"],) if flat else (d["B"], d["T"])
    h = torch.randn(*n, d["H"], generator=g).to(device=device, dtype=dtype)
    w = (torch.randn(d["V"], d["H"], generator=g) * (1.5 / math.sqrt(d["H"]))).to(device=device, dtype=dtype)
    return h.requires_grad_(grad), w.requires_grad_(grad), torch.randint(0, d["V"], n, generator=g).to(device), d, g


def f_btv(device="cpu", dtype=torch.float32, small=True):
    """hidden[B,T,H], weight[V,H], labels[B,T] (already aligned with hidden)."""
    h, w, y, _, _ = _hw(device, dtype, small)
    return h, w, y


def f_nv(device="cpu", dtype=torch.float32, small=True):
    """packed: hidden[N,H], weight[V,H], labels[N]."""
    h, w, y, _, _ = _hw(device, dtype, small, flat=True)
    return h, w, y


def f_ids(device="cpu", dtype=torch.float32, small=True):
    """hidden[B,T,H], weight[V,H], input_ids[B,T] (NOT shifted)."""
    return f_btv(device, dtype, small)


def f_ids_mask(device="cpu", dtype=torch.float32, small=True):
    h, w, y, d, g = _hw(device, dtype, small)
    lens = torch.randint(2, d["T"] + 1, (d["B"],), generator=g)
    m = (torch.arange(d["T"])[None] < lens[:, None]).to(device)
    return h, w, y, m


def f_ids_keep(device="cpu", dtype=torch.float32, small=True):
    h, w, y, d, _ = _hw(device, dtype, small)
    return h, w, y, d["T"] // 2


def f_lab100(device="cpu", dtype=torch.float32, small=True):
    """labels contain -100."""
    h, w, y, m = f_ids_mask(device, dtype, small)
    return h, w, y.masked_fill(~m, -100)


def f_nv100(device="cpu", dtype=torch.float32, small=True):
    h, w, y = f_nv(device, dtype, small)
    return h, w, y.masked_fill(torch.arange(y.numel(), device=device) % 3 == 0, -100)


def f_bias(device="cpu", dtype=torch.float32, small=True):
    h, w, y = f_btv(device, dtype, small)
    b = (torch.randn(w.shape[0], generator=_gen(device, 5)) * 0.3).to(device=device, dtype=dtype).requires_grad_(True)
    return h, w, y, b


def f_temp_btok(device="cpu", dtype=torch.float32, small=True):
    """temperature is a per-token fp32 tensor [B,T]."""
    h, w, y = f_btv(device, dtype, small)
    t = torch.rand(y.shape, generator=_gen(device, 6)).to(device) + 0.5
    return h, w, y, t


def f_temp_ntok(device="cpu", dtype=torch.float32, small=True):
    h, w, y = f_nv(device, dtype, small)
    return h, w, y, torch.rand(y.shape, generator=_gen(device, 6)).to(device) + 0.5


def f_temp_b(device="cpu", dtype=torch.float32, small=True):
    h, w, y = f_btv(device, dtype, small)
    return h, w, y, torch.rand(y.shape[:1], generator=_gen(device, 6)).to(device) + 0.5


def f_temp0d(device="cpu", dtype=torch.float32, small=True):
    h, w, y = f_btv(device, dtype, small)
    return h, w, y, torch.tensor(0.7, device=device)


def f_topk_idx(device="cpu", dtype=torch.float32, small=True):
    """labels[B,T,K] (K ids per position)."""
    h, w, y, d, g = _hw(device, dtype, small)
    return (
        h,
        w,
        torch.stack([torch.randperm(d["V"], generator=g)[:5] for _ in range(y.numel())]).view(*y.shape, 5).to(device),
    )


def f_keepmask(device="cpu", dtype=torch.float32, small=True):
    """[N] labels + [N,V] boolean keep mask (sampler's top-p support)."""
    h, w, y = f_nv(device, dtype, small)
    k = (torch.rand(y.numel(), w.shape[0], generator=_gen(device, 7)) < 0.5).to(device)
    return h, w, y, k


def f_ref(device="cpu", dtype=torch.float32, small=True):
    """policy + reference head: hidden, weight, labels, ref_hidden, ref_weight."""
    h, w, y, m = f_ids_mask(device, dtype, small)
    hr, wr, _, _, _ = _hw(device, dtype, small, grad=False, seed=11)
    return h, w, y, hr, wr, m


def _rl(device, dtype, small, with_ref=True):
    h, w, y, m = f_ids_mask(device, dtype, small)
    g = _gen(device, 21)
    with torch.no_grad():
        lp = torch.log_softmax((h @ w.t()).float(), -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    old = lp + 0.15 * torch.randn(lp.shape, generator=g).to(device)
    ref = lp + 0.3 * torch.randn(lp.shape, generator=g).to(device)
    adv = torch.randn(h.shape[0], generator=g).to(device)
    return h, w, y, old, adv, m.float(), ref


def f_rl(device="cpu", dtype=torch.float32, small=True):
    """hidden, weight, labels, old_logp[B,T], advantages[B], mask[B,T] float."""
    return _rl(device, dtype, small)[:6]


def f_rl_ref(device="cpu", dtype=torch.float32, small=True):
    """... plus ref_logp[B,T]."""
    return _rl(device, dtype, small)


def f_rl_tok(device="cpu", dtype=torch.float32, small=True):
    """token-level advantages [B,T], boolean mask."""
    h, w, y, old, adv, m, ref = _rl(device, dtype, small)
    return h, w, y, old, adv[:, None].expand_as(old).contiguous(), m.bool()


def _packed(device, dtype, small):
    """hidden[N,H], weight, labels[N], old[N], adv[N], mask[N] bool, lengths(list), segment_ids[N], cu_seqlens,
    pos_ids."""
    h, w, y, d, g = _hw(device, dtype, small, flat=True)
    n = y.numel()
    lens = [n // 3, n // 2 - n // 3, n - n // 2]
    seg = torch.repeat_interleave(torch.arange(3), torch.tensor(lens)).to(device)
    cu = torch.tensor([0, lens[0], lens[0] + lens[1], n], device=device)
    pos = torch.cat([torch.arange(x) for x in lens]).to(device)
    m = torch.rand(n, generator=g) < 0.7
    m[0] = m[lens[0]] = m[n - 1] = True
    with torch.no_grad():
        lp = torch.log_softmax((h @ w.t()).float(), -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    old = lp + 0.15 * torch.randn(n, generator=g).to(device)
    adv = torch.randn(3, generator=g).to(device)[seg]
    return h, w, y, old, adv, m.to(device), lens, seg, cu, pos


def f_pk_seg(device="cpu", dtype=torch.float32, small=True):
    """hidden[N,H], weight, labels[N], old[N], adv[N], mask[N], segment_ids[N], num_segments (python int)."""
    h, w, y, o, a, m, lens, seg, cu, pos = _packed(device, dtype, small)
    return h, w, y, o, a, m, seg, 3


def f_pk_seg_noint(device="cpu", dtype=torch.float32, small=True):
    return f_pk_seg(device, dtype, small)[:7]


def f_pk_cu(device="cpu", dtype=torch.float32, small=True):
    h, w, y, o, a, m, lens, seg, cu, pos = _packed(device, dtype, small)
    return h, w, y, o, a, m, cu


def f_pk_lens(device="cpu", dtype=torch.float32, small=True):
    h, w, y, o, a, m, lens, seg, cu, pos = _packed(device, dtype, small)
    return h, w, y, o, a, m, lens


def f_pk_pos(device="cpu", dtype=torch.float32, small=True):
    h, w, y, o, a, m, lens, seg, cu, pos = _packed(device, dtype, small)
    return h, w, y, o, a, m, pos


def f_turn(device="cpu", dtype=torch.float32, small=True):
    """2D with turn ids [B,T] (-1 outside turns) and a python int number of turns."""
    h, w, y, old, adv, m, _ = _rl(device, dtype, small)
    t = (torch.arange(y.shape[1], device=device) // 3)[None].expand_as(y).masked_fill(m == 0, -1)
    return h, w, y, old, adv, m, t.contiguous(), int(y.shape[1] // 3 + 1)


def f_dpo(device="cpu", dtype=torch.float32, small=True):
    """first half of the batch chosen, second half rejected; labels with -100; ref sequence log-probs [B]."""
    h, w, lab = f_lab100(device, dtype, small)
    return h, w, lab, torch.randn(lab.shape[0], generator=_gen(device, 3)).to(device) - 10.0


def f_distill(device="cpu", dtype=torch.float32, small=True):
    h, w, y, hr, wr, m = f_ref(device, dtype, small)
    return h, w, hr, wr, m


# LP: per-token log-probabilities
