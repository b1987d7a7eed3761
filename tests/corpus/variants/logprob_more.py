"""Per-token log-probabilities: rolled labels, chunk loops, filters, other spellings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.variants.inputs import f_btv, f_ids, f_ids_mask, f_keepmask, f_lab100, f_nv, f_nv100, f_topk_idx
from tests.corpus.variants.registry import variant


@variant("LP29", "logp", ["OpenRLHF", "SkyRL", "NeMo-RL/NeMo-Aligner (roll)", "miles"], f_ids_mask)
def lp29_roll_labels_then_slice(hidden, weight, input_ids, action_mask):
    """labels = torch.roll(ids, -1, dims=1); logits.to(fp32); logp over ALL positions; [:, :-1]; [:, -A:] * mask."""
    logits = F.linear(hidden, weight).to(torch.float32)
    labels = torch.roll(input_ids, shifts=-1, dims=1)
    lp = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)
    lp = lp[:, :-1]
    mask = action_mask[:, 1:]
    return lp[:, -mask.shape[1] :] * mask.float()


@variant(
    "LP30",
    "logp",
    ["verl rmpad", "EasyR1 padding_free", "SkyRL remove padding", "OpenRLHF packing"],
    f_ids_mask,
    dynamic=True,
)
def lp30_unpad_roll_pad_back(hidden, weight, input_ids, attention_mask):
    """nonzero(mask) -> index_select tokens -> [1,N] -> roll(-1) -> logp [N] -> index_put back into zeros [B*S] -> view
    -> slice."""
    b, s = input_ids.shape
    idx = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    h = hidden.reshape(b * s, -1).index_select(0, idx)
    ids = input_ids.flatten().index_select(0, idx)
    lp = F.log_softmax((h @ weight.t()).float(), -1).gather(-1, torch.roll(ids, -1, 0).unsqueeze(-1)).squeeze(-1)
    full = torch.zeros(b * s, dtype=lp.dtype, device=lp.device).index_put((idx,), lp).view(b, s)
    return full[:, :-1]


@variant("LP32", "logp", ["ART"], f_btv)
def lp32_seq_chunk_loop_prealloc(hidden, weight, labels, chunk=3):
    """python loop over sequence chunks: matmul -> gather - logsumexp -> slice-assign into torch.empty (autograd through
    copy)."""
    lm_t = weight.t().to(hidden.dtype)
    out = torch.empty(labels.shape, dtype=hidden.dtype, device=hidden.device)
    for i in range(0, hidden.shape[1], chunk):
        lg = torch.matmul(hidden[:, i : i + chunk, :], lm_t)
        sel = torch.gather(lg, -1, labels[:, i : i + chunk].unsqueeze(-1)).squeeze(-1)
        out[:, i : i + chunk] = sel - torch.logsumexp(lg, dim=-1)
    return out


@variant("LP33", "logp", ["unsloth-zoo chunked hidden-states path (fullgraph, dynamic)"], f_btv)
def lp33_flat_chunk_concat_scale_softcap(
    hidden, weight, labels, chunks=4, mul=1.25, div=2.0, cap=20.0, temperature=0.9
):
    """reshape(-1,H) -> torch.chunk -> (@w.t()) -> *mul -> /div -> cap*tanh(x/cap) -> float -> /T -> gather-lse ->
    concat -> reshape."""
    hs = torch.chunk(hidden.reshape(-1, hidden.shape[-1]), chunks=chunks, dim=0)
    ys = torch.chunk(labels.reshape(-1), chunks=chunks, dim=0)
    outs = []
    for h, y in zip(hs, ys):
        lg = h.to(weight.dtype) @ weight.t()
        lg = lg * mul
        lg = lg / div
        lg = cap * torch.tanh(lg / cap)
        lg = lg.to(torch.float32) / temperature
        outs.append(torch.gather(lg, -1, y.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(lg, -1))
    return torch.concat(outs).reshape(labels.shape)


@variant(
    "LP34", "loss", ["TRL SFT chunked CE", "torchtune LinearCrossEntropy (no ckpt)", "torchtitan ChunkedLoss"], f_nv100
)
def lp34_checkpointed_chunk_nll(hidden, weight, labels, chunk=5):
    """per-chunk checkpoint(use_reentrant=False) of fp32 head -> log_softmax -> nll_loss(sum, ignore_index); summed."""

    def one(h, w, y):
        lp = F.log_softmax(h.float() @ w.float().t(), dim=-1)
        return F.nll_loss(lp, y, ignore_index=-100, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for s in range(0, hidden.shape[0], chunk):
        total = total + checkpoint(one, hidden[s : s + chunk], weight, labels[s : s + chunk], use_reentrant=False)
    return total / (labels != -100).sum()


@variant("LP35", "logp", ["NeMo-RL logprob_chunk_size", "SkyRL/megatron chunks"], f_ids)
def lp35_seq_chunk_logsoftmax_cat(hidden, weight, input_ids, chunk=3):
    """logits materialised once; per seq chunk: slice -> float32 -> contiguous -> log_softmax -> gather; cat(dim=1)."""
    logits = F.linear(hidden, weight)
    nxt = input_ids[:, 1:]
    t = nxt.shape[1]
    logits = logits[:, :t, :]
    outs = []
    for s in range(0, t, chunk):
        e = min(s + chunk, t)
        lg = logits[:, s:e, :].to(torch.float32).contiguous()
        outs.append(F.log_softmax(lg, -1).gather(-1, nxt[:, s:e].unsqueeze(-1)).squeeze(-1))
    return torch.cat(outs, dim=1)


@variant("LP37", "logp", ["Fast-LLM softmax_base", "Megatron-Core vocab-parallel CE (1 rank)"], f_nv100)
def lp37_manual_max_sub_exp_sum_log(hidden, weight, labels, scale=1.0):
    """float -> max(dim)[0] -> subtract -> exp -> sum -> log; target index = labels * mask; predicted - log(sum)."""
    logits = (hidden @ weight.t()).float() * scale
    m = logits.max(dim=-1)[0]
    norm = (logits - m.unsqueeze(-1)).float()
    s = norm.exp().sum(dim=-1)
    mask = labels >= 0
    pred = norm.gather(-1, (labels * mask).unsqueeze(-1)).squeeze(-1)
    return (pred - s.log()) * mask


@variant("LP40", "logp", ["torchrl distributions", "RL toy code"], f_btv)
def lp40_categorical_log_prob(hidden, weight, labels):
    """torch.distributions.Categorical(logits=...).log_prob: logits - logsumexp(keepdim) -> broadcast ->
    gather([...,:1]) -> squeeze."""
    return torch.distributions.Categorical(logits=F.linear(hidden, weight).float(), validate_args=False).log_prob(
        labels
    )


@variant("LP41", "logp", ["slime top-p replay", "NeMo-RL top-k/top-p (mask from sort)"], f_keepmask)
def lp41_keep_mask_filtered(hidden, weight, labels, keep):
    """masked_fill(~keep, -inf) with the target always kept, then log_softmax-gather (renormalised over a support
    set)."""
    lg = (hidden @ weight.t()).float()
    tgt = F.one_hot(labels, lg.shape[-1]).bool()
    lg = lg.masked_fill(~(keep | tgt), float("-inf"))
    return F.log_softmax(lg, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP42", "logp", ["NeMo-RL TrainingSamplingParams", "verl post_process_logits (todo)"], f_btv)
def lp42_topk_filtered(hidden, weight, labels, k=8):
    """kth-largest threshold via topk, masked_fill(-inf), log_softmax-gather, -inf replaced by 0 for filtered
    targets."""
    lg = F.linear(hidden, weight).float()
    kth = torch.topk(lg, k, dim=-1).values[..., -1:]
    lp = F.log_softmax(lg.masked_fill(lg < kth, float("-inf")), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return lp.masked_fill(lp == float("-inf"), 0.0)


@variant("LP44", "logp", ["TRL SFT chunk (XLA-safe packing)"], f_nv100)
def lp44_argsort_pack_valid_first(hidden, weight, labels):
    """static-shape packing: order = argsort(valid, descending, stable); index hidden/labels; CE with ignore_index;
    unsort."""
    valid = labels != -100
    order = valid.to(torch.int8).argsort(descending=True, stable=True)
    ce = F.cross_entropy((hidden[order] @ weight.t()).float(), labels[order], reduction="none", ignore_index=-100)
    return -torch.zeros_like(ce).index_put((order,), ce)


@variant("LP45", "logp", ["TRL selective_log_softmax (index [...,K])", "NeMo-RL / verl top-k distillation"], f_topk_idx)
def lp45_gather_k_per_position(hidden, weight, index):
    """K ids per position: gather([B,T,K]) - logsumexp.unsqueeze(-1) -> [B,T,K]."""
    lg = F.linear(hidden, weight).float()
    return torch.gather(lg, -1, index) - torch.logsumexp(lg, -1).unsqueeze(-1)


@variant("LP46", "logp", ["accelerate/unsloth/axolotl/ART (autocast head)"], f_btv)
def lp46_autocast_head(hidden, weight, labels):
    """lm_head under autocast(bf16) with fp32 params, logits upcast afterwards (nan_to_num as axolotl does)."""
    with torch.autocast(device_type=hidden.device.type, dtype=torch.bfloat16):
        lg = F.linear(hidden, weight)
    lg = torch.nan_to_num(lg.float(), nan=0.0)
    return lg.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - lg.logsumexp(-1)


@variant("LP47", "loss", ["HF ForCausalLMLoss (SFT in every framework)"], f_lab100)
def lp47_hf_causal_lm_loss(hidden, weight, labels):
    """logits.float(); labels padded right by one -100 and shifted; view(-1); cross_entropy(sum)/num_items."""
    lg = F.linear(hidden, weight).float()
    lab = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(lg.view(-1, lg.shape[-1]), lab.view(-1), ignore_index=-100, reduction="sum") / 17.0


@variant("LP48", "logp", ["Liger selective log-prob", "prime-rl fused head", "TRL>=1.16 kernel"], f_nv)
def lp48_online_lse_over_vocab_chunks(hidden, weight, labels, vchunk=16, temperature=0.9):
    """already-streamed peer: loop over weight rows, running max/sum rescale, in-range target pick with where (plain
    autograd)."""
    inv = 1.0 / temperature
    n, v = hidden.shape[0], weight.shape[0]
    m = torch.full((n,), float("-inf"), device=hidden.device)
    s = torch.zeros(n, device=hidden.device)
    t = torch.zeros(n, device=hidden.device)
    for a in range(0, v, vchunk):
        b = min(a + vchunk, v)
        lg = (hidden @ weight[a:b].t()).float() * inv
        mn = torch.maximum(m, lg.amax(-1))
        s = s * torch.exp(m - mn) + torch.exp(lg - mn.unsqueeze(-1)).sum(-1)
        m = mn
        hit = (labels >= a) & (labels < b)
        loc = (labels - a).clamp(0, b - a - 1)
        t = torch.where(hit, lg.gather(1, loc.unsqueeze(1)).squeeze(1), t)
    return t - (m + torch.log(s))


@variant("LP49", "logp", ["user scripts"], f_btv, synthetic=True)
def lp49_log_of_softmax(hidden, weight, labels):
    """naive torch.log(softmax).gather (numerically worse; a rewrite changes underflow behaviour)."""
    return torch.log(torch.softmax(F.linear(hidden, weight).float(), -1)).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@variant("LP50", "logp", ["user scripts", "PPO one-hot code"], f_btv, synthetic=True)
def lp50_one_hot_dot(hidden, weight, labels):
    """(one_hot(labels) * log_softmax).sum(-1) in place of gather."""
    lp = F.log_softmax(F.linear(hidden, weight).float(), -1)
    return (F.one_hot(labels, lp.shape[-1]).to(lp.dtype) * lp).sum(-1)


@variant("LP53", "logp", ["torchtune batched_logits_to_logprobs"], f_btv)
def lp53_batch_chunks_into_int_like_buffer(hidden, weight, labels, chunk=1):
    """result = empty_like(labels, dtype=fp32); batch-chunk loop; log_softmax(logits/T) gather(dim 2) slice-assigned."""
    logits = F.linear(hidden, weight)
    out = torch.empty_like(labels, dtype=torch.float32)
    for s in range(0, logits.shape[0], chunk):
        lp = F.log_softmax(logits[s : s + chunk] / 1.3, dim=-1)
        out[s : s + chunk] = torch.gather(lp, 2, labels[s : s + chunk].unsqueeze(-1)).squeeze(-1)
    return out


@variant("LP55", "logp", ["ref/old log-prob pass in every framework"], f_btv, grad=False)
def lp55_no_grad_pass(hidden, weight, labels):
    """inference-only pass (old / reference log-probs) under torch.no_grad."""
    with torch.no_grad():
        lg = F.linear(hidden, weight).float() / 0.9
        return lg.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# ENT: entropy
