"""Repeated calls: what makes a compiled function recompile."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.corpus.faults.inputs import head, ints, naive, pick, rand, rng
from tests.corpus.faults.registry import CASES, sequence
from tests.corpus.faults.segments import gspo, gspo_args


@sequence("seq_token_counts", "token count changes every step", "pytorch/torchtitan#2823")
def _():
    calls = [
        ((rand(n, 16, seed=n, grad=True), rand(37, 16, seed=2, grad=True), ints(37, n)), {})
        for n in (13, 17, 29, 31, 64, 65, 130)
    ]
    return naive, calls, "at most 2 graphs"


@sequence("seq_num_segments", "python int n and token count change", "ServiceNow/Fast-LLM#517")
def _():
    shapes = [(5, 3, 8), (4, 4, 4, 4), (9, 2), (3,) * 7, (2, 6, 1, 8, 3), (11, 12)]
    return gspo, [(gspo_args(*s), {}) for s in shapes], "at most 2-3 graphs, none for each new n"


@sequence("seq_tokens_through_one_and_zero", "token count 8, 1, 0, 9", "pytorch/pytorch#106067")
def _():
    calls = [((rand(n, 16, seed=5, grad=True), rand(37, 16, seed=2, grad=True), ints(37, n)), {}) for n in (8, 1, 0, 9)]
    return naive, calls, "0/1 specialisation: at most two extra graphs, empty result for 0"


@sequence("seq_temperature_float", "a new python float each call", "verl-project/verl#6110")
def _():
    def fn(h, w, t, temp):
        return pick((F.linear(h, w) / temp).log_softmax(-1), t)

    return fn, [((*head(), x), {}) for x in (1.0, 0.9, 0.8, 0.7, 0.65)], "one graph per float is the failure"


@sequence("seq_grad_then_no_grad", "policy pass then reference pass", "pytorch/pytorch#141589")
def _():
    calls = []
    for _ in range(3):
        calls.append((head(), {}))
        calls.append((head(gh=False, gw=False), {}))
    return naive, calls, "two graphs, not one per switch"


@sequence("seq_stride_changes", "contiguous, then sliced hidden", "pytorch/pytorch#153204")
def _():
    h, w, t = head()
    big = rand(26, 16, seed=3).requires_grad_()
    return naive, [((h, w, t), {}), ((big[::2], w, t), {}), ((h, w, t), {})], "right each time; at most two graphs"


@sequence("seq_split_lengths", "a new python list of lengths each call", "Tencent-Hunyuan/UniRL#178")
def _():
    fn = CASES["gspo_form_split_loop"].build()[0]
    calls = []
    for lens in ([5, 3, 8], [4, 4, 8], [2, 9, 5], [10, 3, 3]):
        new, old, _, adv, _ = gspo_args(*lens)
        calls.append(((new, old, adv, lens), {}))
    return fn, calls, "tell the user to pass ids or cu_seqlens as a tensor"


@sequence("seq_gather_reduce_scatter", "gather, row reduction, scatter back, two shapes", "pytorch/pytorch#194490")
def _():
    def fn(state, idx):
        rows = state.gather(0, idx.unsqueeze(-1).expand(-1, state.shape[1]))
        rows = rows / (rows.square().mean(-1, keepdim=True).sqrt() + 1e-6)
        return state.scatter(0, idx.unsqueeze(-1).expand(-1, state.shape[1]), rows)

    calls = [
        ((rand(a, b, seed=a), torch.randperm(a, generator=rng(4))[: a // 2]), {})
        for a, b in ((64, 2048), (96, 3000), (128, 4100))
    ]
    return fn, calls, "torch 2.13 on CUDA emitted code that did not compile for the second shape"
