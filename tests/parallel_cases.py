"""Losses over a vocabulary that is split over ranks, in the spellings of Megatron, verl and Fast-LLM and as one writes
them with functional collectives; for ``tests/test_parallel.py``.

Each function takes this rank's ``hidden [N, H]``, ``weight [V / ranks, H]`` and whole ``labels [N]``, of a shard that
starts at column ``part.start``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

N, H, V = 24, 8, 37
"""Tokens, features, vocabulary of one rank."""


@dataclasses.dataclass(frozen=True)
class Part:
    """This rank's part of the vocabulary."""

    group: Any
    start: int


def inside_of(labels: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Which labels are in ``start : start + size``, and their columns there (0 for the others)."""
    inside = (labels >= start) & (labels < start + size)
    return inside, torch.where(inside, labels - start, 0)


# Functional collectives, which autograd differentiates


def log_probs(z: Tensor, labels: Tensor, part: Part) -> Tensor:
    """Log-probs of the labels, from this rank's logits ``z``."""
    most = funcol.all_reduce(z.detach().amax(-1), "max", part.group)
    z = z - most.unsqueeze(-1)
    total = funcol.all_reduce(z.exp().sum(-1), "sum", part.group)
    inside, column = inside_of(labels, part.start, z.shape[-1])
    picked = z.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
    return funcol.all_reduce(picked, "sum", part.group) - total.log()


def functional(hidden, weight, labels, part):
    return log_probs((hidden @ weight.t()).float(), labels, part)


def batch(hidden, weight, bias, labels, part):
    """``[B, T]`` tokens, bias, temperature, shifted labels."""
    z = torch.nn.functional.linear(hidden, weight, bias)[:, :-1].float() / 0.7
    return log_probs(z, labels[:, 1:], part)


def entropy(hidden, weight, labels, part):
    """Entropy of which autograd takes the gradient, by ``p * log p``."""
    z = (hidden @ weight.t()).float()
    most = funcol.all_reduce(z.detach().amax(-1, keepdim=True), "max", part.group)
    total = funcol.all_reduce((z - most).exp().sum(-1, keepdim=True), "sum", part.group)
    logp = z - (most + total.log())
    inside, column = inside_of(labels, part.start, z.shape[-1])
    picked = torch.where(inside, logp.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
    each = funcol.all_reduce(-(logp.exp() * logp).sum(-1), "sum", part.group)
    return funcol.all_reduce(picked, "sum", part.group), each


def unusual(hidden, weight, labels, part):
    """Forms that do not fall apart: a log of the softmax, a maximum of it."""
    z = (hidden @ weight.t()).float()
    most = funcol.all_reduce(z.detach().amax(-1, keepdim=True), "max", part.group)
    exponentials = (z - most).exp()
    softmax = exponentials / funcol.all_reduce(exponentials.sum(-1, keepdim=True), "sum", part.group)
    each = funcol.all_reduce(-(softmax * (softmax + 1e-9).log()).sum(-1), "sum", part.group)
    return each, funcol.all_reduce(softmax.detach().amax(-1), "max", part.group)


def padded(hidden, weight, labels, allowed, part):
    """Columns that may not be sampled, of some rows all that this rank has."""
    z = (hidden @ weight.t()).float().masked_fill(~allowed, -torch.inf)
    return log_probs(z, labels, part)


def in_chunks(hidden, weight, labels, part):
    """The user's own loop over chunks of tokens, each with its own collectives."""
    found = [log_probs(h @ weight.t(), y, part) for h, y in zip(hidden.split(7), labels.split(7))]
    return torch.cat(found)


def grpo(hidden, weight, frozen, labels, advantages, part):
    """A clipped loss with a KL term to a frozen head, as one number."""
    logp = log_probs((hidden @ weight.t()).float(), labels, part)
    with torch.no_grad():
        reference = log_probs((hidden @ frozen.t()).float(), labels, part)
    ratio = (logp - logp.detach()).exp()
    least = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = reference - logp
    return -(least - 0.1 * (gap.exp() - gap - 1)).mean()


def over_segments(logp, advantages, part):
    """GSPO of packed segments whose tokens lie on several ranks: sums, all-reduce, one expression a segment, back."""
    ids = torch.arange(logp.numel(), device=logp.device) // 5
    count = (logp.numel() - 1) // 5 + 1
    log_ratio = logp - logp.detach() * 0.95
    total = logp.new_zeros(count).index_add_(0, ids, log_ratio)
    tokens = logp.new_zeros(count).index_add_(0, ids, torch.ones_like(logp))
    total, tokens = (funcol.all_reduce(x, "sum", part.group) for x in (total, tokens))
    ratio = (total / tokens).exp()[ids]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def sequence_parallel(hidden, weight, labels, advantages, part):
    """Each rank has the whole head and some tokens of every segment."""
    logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    labels = (labels + part.start) % weight.shape[0]
    return over_segments(logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), advantages, part)


def both_parallel(hidden, weight, labels, advantages, part):
    """A split head, and segments over ranks."""
    return over_segments(log_probs(hidden @ weight.t(), labels, part), advantages, part)


# In place, as Dynamo traces torch.distributed.all_reduce


class CrossEntropy(torch.autograd.Function):
    """Megatron's way: the softmax is made in the memory of the logits, and is the gradient but for the labels."""

    @staticmethod
    def forward(ctx, logits, labels, group, start):
        logits = logits.float()
        most = torch.max(logits, dim=-1)[0]
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        logits = logits - most.unsqueeze(-1)
        size = logits.size(-1)
        outside = (labels < start) | (labels >= start + size)
        columns = labels.clone() - start
        columns[outside] = 0
        rows = torch.arange(labels.numel(), device=labels.device)
        picked = logits.view(-1, size)[rows, columns.view(-1)].clone().view_as(labels)
        picked[outside] = 0.0
        exponentials = logits
        torch.exp(logits, out=exponentials)
        total = exponentials.sum(dim=-1)
        dist.all_reduce(picked, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponentials, outside, columns)
        return total.log() - picked

    @staticmethod
    def backward(ctx, gradient):
        softmax, outside, columns = ctx.saved_tensors
        flat = softmax.view(-1, softmax.size(-1))
        rows = torch.arange(flat.size(0), device=flat.device)
        flat[rows, columns.view(-1)] -= 1.0 - outside.view(-1).to(flat.dtype)
        softmax.mul_(gradient.unsqueeze(-1))
        return softmax, None, None, None


def megatron(hidden, weight, labels, part):
    return -CrossEntropy.apply(hidden @ weight.t(), labels, part.group, part.start)


class Entropy(torch.autograd.Function):
    """verl's way: three collectives one after the other, a gradient of its own."""

    @staticmethod
    def forward(ctx, logits, group):
        most = logits.max(dim=-1, keepdim=True).values
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - most).exp_()
        total = exponentials.sum(dim=-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax = exponentials.div_(total)
        mean = (softmax * logits).sum(dim=-1, keepdim=True)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (most + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx, gradient):
        logits, softmax, mean = ctx.saved_tensors
        return softmax * (mean - logits) * gradient.unsqueeze(-1), None


def verl(hidden, weight, labels, part):
    logits = hidden @ weight.t()
    return CrossEntropy.apply(logits.clone(), labels, part.group, part.start), Entropy.apply(logits, part.group)


def fast_llm(hidden, weight, labels, part):
    """Fast-LLM's way: the gradient is written in the forward."""
    logits = (hidden @ weight.t()).float()
    most = torch.max(logits, dim=-1, keepdim=True)[0]
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=part.group)
    shifted = logits - most
    exponentials = shifted.exp()
    total = exponentials.sum(dim=-1, keepdim=True)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=part.group)
    size = logits.size(-1)
    labels = labels.unsqueeze(-1)
    mask = (labels >= part.start) * (labels < part.start + size)
    columns = (labels - part.start) * mask
    picked = mask * shifted.gather(1, columns)
    dist.all_reduce(picked, op=dist.ReduceOp.SUM, group=part.group)
    gradient = exponentials.scatter(1, columns, exponentials.gather(1, columns) - mask * total)
    gradient = (gradient / total / labels.numel()).to(hidden.dtype)
    return (total.log() - picked).mean(), gradient @ weight, gradient.t() @ hidden


def gathered(hidden, weight, labels, part):
    """The logits of all ranks on each of them: nothing to stream."""
    whole = funcol.all_gather_tensor((hidden @ weight.t()).float(), -1, part.group)
    return whole.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# Inputs


def tensors(rank: int, sizes: list[int]) -> dict[str, Tensor]:
    """What the functions take, this rank's part; ``sizes`` are the vocabulary of each rank."""
    g = torch.Generator().manual_seed(11)
    weight, frozen = (torch.randn(sum(sizes), H, generator=g) for _ in range(2))
    bias = torch.randn(sum(sizes), generator=g)
    allowed = torch.rand(N, sum(sizes), generator=g) > 0.3
    labels = torch.randint(0, sum(sizes), (N,), generator=g)
    allowed[torch.arange(N), labels] = True
    for row in range(0, N, 3):  # all columns of a rank, unless the label is there
        other = next(r for r in range(len(sizes)) if not sum(sizes[:r]) <= labels[row] < sum(sizes[: r + 1]))
        allowed[row, sum(sizes[:other]) : sum(sizes[: other + 1])] = False
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return {
        "hidden": torch.randn(N, H, generator=g).requires_grad_(),
        "weight": weight[mine].clone().requires_grad_(),
        "frozen": frozen[mine].clone(),
        "bias": bias[mine].clone().requires_grad_(),
        "labels": labels,
        "allowed": allowed[:, mine].clone(),
        "advantages": torch.randn(N, generator=g),
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, what it takes of :func:`tensors` (in order), and what its rewrite must look like.

    ``matmuls`` of all programs; 4 are two passes, 2 a forward."""

    function: Callable[..., Any]
    takes: tuple[str, ...] = ("hidden", "weight", "labels")
    matmuls: int = 4
    backward: bool = True
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (N,)
    uneven: bool = False
    """The ranks' parts differ in size."""
    seams: int = 0
    """Rewrites of sums per segment."""
    frozen: bool = False
    """Only hidden is trained."""
    extreme: bool = False
    """Rows of hidden that are large, not finite, or zero, and a rank whose logits are far below the others'."""


CASES: dict[str, Case] = {
    "functional": Case(functional),
    "functional, no gradient": Case(functional, matmuls=1, backward=False),
    "functional, uneven": Case(functional, uneven=True),
    "functional, extreme": Case(functional, extreme=True),
    "megatron, extreme": Case(megatron, extreme=True),
    "batch": Case(batch, ("hidden", "weight", "bias", "labels"), shape=(3, 8), dtype=torch.bfloat16),
    "frozen head": Case(functional, matmuls=3, frozen=True),
    "entropy": Case(entropy),
    "unusual": Case(unusual, matmuls=6),
    "padded": Case(padded, ("hidden", "weight", "labels", "allowed")),
    "in chunks": Case(in_chunks),
    "grpo": Case(grpo, ("hidden", "weight", "frozen", "labels", "advantages"), matmuls=5),
    "sequence parallel": Case(sequence_parallel, ("hidden", "weight", "labels", "advantages"), seams=1),
    "both parallel": Case(both_parallel, ("hidden", "weight", "labels", "advantages"), seams=1),
    "megatron": Case(megatron),
    "verl": Case(verl),
    "verl, bfloat16": Case(verl, dtype=torch.bfloat16),
    "fast_llm": Case(fast_llm, backward=False),
}
