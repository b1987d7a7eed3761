"""The sequence-level ratio: per-token terms, segment sums, back to tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.faults.inputs import head, naive, rand
from tests.corpus.faults.registry import case
from tests.corpus.faults.segments import gspo, gspo_args, seg_ids, seg_mean


@case("gspo_basic", "three packed documents", "ServiceNow/Fast-LLM#517", group="gspo")
def _():
    return gspo, gspo_args(5, 3, 8), {}, "equal to eager"


@case("gspo_end_to_end", "head, gather and segment seam in one function", "ServiceNow/Fast-LLM#517", group="gspo")
def _():
    def fn(h, w, t, old, seg, adv, n):
        return gspo(naive(h, w, t), old, seg, adv, n)

    _, old, seg, adv, n = gspo_args(5, 3, 8)
    return fn, (*head(n=16), old - 3.6, seg, adv, n), {}, "equal to eager incl. hidden and weight grads"


@case("gspo_one_segment", "one document in the micro-batch", "pytorch/pytorch#171493", group="gspo")
def _():
    return gspo, gspo_args(9), {}, "0/1 specialisation must not change the value"


@case(
    "gspo_one_segment_read_back",
    "size-1 index_add_ result gathered back to tokens",
    "pytorch/pytorch#191571",
    group="gspo",
)
def _():
    def fn(new, old, seg, adv, n):
        m = seg_mean(new - old, seg, n)
        return torch.exp(m[seg]) * adv[seg]

    return (
        fn,
        gspo_args(64),
        {},
        "plain Inductor on CUDA read the buffer before the atomic add and returned stale zeros;"
        " compare with eager, not with torch.compile",
    )


@case("gspo_token_form", "log s = sg[mean] + lp - sg[lp], per token", "verl-project/verl#2775", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        m = seg_mean(new - old, seg, n).detach()[seg]
        r = torch.exp(m + new - new.detach())
        a = adv[seg]
        return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).mean()

    return fn, gspo_args(5, 3, 8), {}, "stop-gradient kept: gradient differs from the sequence form"


@case("gspo_empty_segment", "a document without tokens, count clamped to 1", "OpenRLHF/OpenRLHF#1293", group="gspo")
def _():
    new, old, _, _, _ = gspo_args(5, 3, 8)
    seg = seg_ids(5, 0, 3, 8)
    return gspo, (new, old, seg, rand(4, seed=22), 4), {}, "ratio 1 for the empty one; finite"


@case("gspo_all_masked", "mask is zero everywhere", "unslothai/unsloth-zoo#1286", group="gspo")
def _():
    def fn(new, old, seg, adv, n, mask):
        x = (new - old) * mask
        tot = torch.zeros(n).index_add_(0, seg, x)
        cnt = torch.zeros(n).index_add_(0, seg, mask)
        r = torch.exp(tot / cnt.clamp(min=1))
        live = (cnt > 0).to(r.dtype)
        return -(torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv) * live).sum() / live.sum().clamp(min=1)

    args = gspo_args(5, 3, 8)
    return fn, (*args, torch.zeros(16)), {}, "0.0 with zero gradient"


@case("gspo_masked_tokens_inert", "garbage under the mask must not matter", "MakazhanAlpamys/Soup#723", group="gspo")
def _():
    def fn(new, old, seg, adv, n, mask):
        x = torch.where(mask, new - old, 0.0)
        tot = torch.zeros(n).index_add_(0, seg, x)
        cnt = torch.zeros(n).index_add_(0, seg, mask.float())
        r = torch.exp(tot / cnt.clamp(min=1))
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    new, old, seg, adv, n = gspo_args(5, 3, 8)
    mask = torch.ones(16, dtype=torch.bool)
    mask[[0, 6, 15]] = False
    old = old.clone()
    old[6] = 1e4
    old[15] = float("nan")
    return fn, (new, old, seg, adv, n, mask), {}, "finite; masked tokens get exactly zero gradient"


@case(
    "gspo_exp_overflow",
    "mean log-ratio 200, negative advantage",
    "OpenRLHF/OpenRLHF#1293",
    group="gspo",
    nonfinite=True,
)
def _():
    new, old, seg, _, n = gspo_args(5, 3, 8)
    old = old.clone()
    old[5:8] -= 200
    return (
        gspo,
        (new, old, seg, torch.tensor([1.0, -1.0, 1.0]), n),
        {},
        "inf/nan as eager; must not leak into gradients of the other documents",
    )


@case("gspo_exp_clamped", "same with the exponent clamped", "OpenRLHF/OpenRLHF#1293", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        r = torch.exp(seg_mean(new - old, seg, n).clamp(-20, 20))
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    new, old, seg, _, n = gspo_args(5, 3, 8)
    old = old.clone()
    old[5:8] -= 200
    return fn, (new, old, seg, torch.tensor([1.0, -1.0, 1.0]), n), {}, "finite; the clamp is not dropped"


@case("gspo_crosses_chunks", "documents of 129, 1 and 170 tokens", "NovaSky-AI/SkyRL#902", group="gspo")
def _():
    return gspo, gspo_args(129, 1, 170), {}, "a document that spans several streaming chunks"


@case("gspo_many_segments", "200 documents of 1..3 tokens", "ServiceNow/Fast-LLM#517", group="gspo")
def _():
    return gspo, gspo_args(*([1, 2, 3, 2] * 50)), {}, "more segments than a tile"


@case("gspo_dump_row", "padding tokens use an extra segment that is sliced off", "google/tunix#1659", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        r = torch.exp(seg_mean(new - old, seg, n + 1)[:n])
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    new, old, seg, adv, n = gspo_args(5, 3, 8)
    seg = seg.clone()
    seg[-3:] = n
    return fn, (new, old, seg, adv, n), {}, "padding gets zero gradient"


@case(
    "gspo_segment_out_of_range",
    "a segment id equal to n",
    "huggingface/trl#1941",
    group="gspo",
    raises=(IndexError, RuntimeError),
)
def _():
    new, old, seg, adv, n = gspo_args(5, 3, 8)
    seg = seg.clone()
    seg[2] = n
    return gspo, (new, old, seg, adv, n), {}, "raise, never write outside the buffer"


@case("gspo_int32_ids", "int32 segment ids", "ServiceNow/Fast-LLM#517", group="gspo")
def _():
    new, old, seg, adv, n = gspo_args(5, 3, 8)
    return gspo, (new, old, seg.int(), adv, n), {}, "equal to eager"


@case("gspo_bf16_counts", "700 bf16 tokens: a bf16 counter stops at 256", "pytorch/executorch#20089", group="gspo")
def _():
    return (
        gspo,
        gspo_args(700, 3, dtype=torch.bfloat16),
        {},
        "eager itself is far off here; compare with float64 and say which one the product follows",
    )


@case(
    "gspo_token_advantages",
    "advantages given per token, averaged per document",
    "ServiceNow/Fast-LLM#517",
    group="gspo",
)
def _():
    def fn(new, old, seg, adv_tok, n):
        return gspo(new, old, seg, seg_mean(adv_tok, seg, n), n)

    new, old, seg, _, n = gspo_args(5, 3, 8)
    return fn, (new, old, seg, rand(16, seed=30), n), {}, "three segment reductions share the ids"


@case("gspo_on_policy", "old = new.detach(): ratio exactly 1", "NVIDIA-NeMo/labs-molt#53", group="gspo")
def _():
    def fn(new, seg, adv, n):
        return gspo(new, new.detach(), seg, adv, n)

    new, _, seg, adv, n = gspo_args(5, 3, 8)
    return fn, (new, seg, adv, n), {}, "value -mean(adv); gradient not zero; new - new.detach() not folded to 0"


@case("gspo_n_from_tensor", "n = int(seg.max()) + 1 inside the function", "pytorch/pytorch#171493", group="gspo")
def _():
    def fn(new, old, seg, adv):
        return gspo(new, old, seg, adv, int(seg.max()) + 1)

    new, old, seg, adv, _ = gspo_args(5, 3, 8)
    return fn, (new, old, seg, adv), {}, "graph break or unbacked size, same value"


@case("gspo_zero_buffer_expanded", "index_add on an expanded zero", "pytorch/pytorch#183986", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        z = torch.zeros(1).expand(n)
        return torch.exp(torch.index_add(z, 0, seg, new - old)) * adv

    return fn, gspo_args(5, 3, 8), {}, "out of place add on a stride-0 base; torch.compile returned wrong rows"


@case("gspo_index_add_alpha", "index_add_ with alpha", "pytorch/pytorch#111203", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        s = torch.zeros(n).index_add_(0, seg, new - old, alpha=0.25)
        return torch.exp(s) * adv

    return fn, gspo_args(4, 4, 4), {}, "alpha applied"


@case("gspo_form_scatter_add", "scatter_add_ spelling", "pytorch/pytorch#191571", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        x = new - old
        tot = torch.zeros(n).scatter_add_(0, seg, x)
        cnt = torch.bincount(seg, minlength=n).clamp(min=1)
        r = torch.exp(tot / cnt)
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    return fn, gspo_args(5, 3, 8), {}, "equal to eager"


@case("gspo_form_scatter_reduce", "scatter_reduce mean spelling", "pytorch/pytorch#191571", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        m = torch.zeros(n).scatter_reduce(0, seg, new - old, "mean", include_self=False)
        r = torch.exp(m)
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    return fn, gspo_args(5, 3, 8), {}, "equal to eager"


@case("gspo_form_one_hot", "one-hot matrix product spelling", "ServiceNow/Fast-LLM#517", group="gspo")
def _():
    def fn(new, old, seg, adv, n):
        oh = F.one_hot(seg, n).to(new.dtype)
        r = torch.exp((new - old) @ oh / oh.sum(0).clamp(min=1))
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    return fn, gspo_args(5, 3, 8), {}, "equal to eager"


@case("gspo_form_padded", "padded [B,T] with a mask, row sums", "verl-project/verl#2775", group="gspo")
def _():
    def fn(new, old, adv, mask):
        m = ((new - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        r = torch.exp(m)
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    mask = (torch.arange(8) < torch.tensor([[5], [3], [8]])).float()
    return (
        fn,
        (rand(3, 8, seed=20, scale=0.3, grad=True), rand(3, 8, seed=21, scale=0.3), rand(3, seed=22), mask),
        {},
        "equal to eager",
    )


@case("gspo_form_split_loop", "torch.split by python lengths, mean of each", "Tencent-Hunyuan/UniRL#178", group="gspo")
def _():
    def fn(new, old, adv, lengths):
        m = torch.stack([p.mean() for p in (new - old).split(lengths)])
        r = torch.exp(m)
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    new, old, _, adv, _ = gspo_args(5, 3, 8)
    return fn, (new, old, adv, [5, 3, 8]), {}, "list of ints: recompiles for each new list"


@case("gspo_broadcast_bug", "[B] times [B,T] mask", "hiyouga/EasyR1#596", group="gspo", raises=RuntimeError)
def _():
    def fn(m, mask):
        return torch.exp(m * mask)

    return fn, (torch.zeros(3), torch.ones(3, 8)), {}, "shape error stays a shape error"
