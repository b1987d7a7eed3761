"""Loops over pieces of the logits: one region, one pass, whatever the pieces are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_grpo
from tests import harness
from tests.test_public_reports import B, H, N, T, V, inputs, selected

Loss = Callable[..., Any]
LOOPS: dict[str, tuple[Loss, tuple[int, ...]]] = {}


def loop(*shape: int) -> Callable[[Loss], Loss]:
    """Registers a function of hidden, weight, labels, old and mask, of these row sizes."""

    def register(function: Loss) -> Loss:
        LOOPS[function.__name__] = function, shape
        return function

    return register


def ratio(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return ((logp - old).exp() * mask).sum()


def entropy(logits: Tensor) -> Tensor:
    logp = logits.float().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


@loop(N)
def rows_in_blocks(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    return ratio(torch.cat([selected(z, y) for z, y in zip(logits.split(8), labels.split(8))]), old, mask)


@loop(B, T)
def a_sequence_at_a_time(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight)
    return ratio(torch.stack([selected(z, y) for z, y in zip(logits, labels)]), old, mask)


@loop(B, T)
def sequences_by_their_number(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight)
    return ratio(torch.stack([selected(logits[i], labels[i]) for i in range(logits.shape[0])]), old, mask)


@loop(B, T)
def sequences_as_slices(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight)
    return ratio(torch.cat([selected(logits[i : i + 1], labels[i : i + 1]) for i in range(B)]), old, mask)


@loop(B, T)
def parts_of_sequences(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight)
    parts = [selected(logits[:, s : s + 3], labels[:, s : s + 3]) for s in range(0, T, 3)]
    return ratio(torch.cat(parts, dim=1), old, mask)


@loop(B, T)
def flat_blocks_of_a_batch(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight).view(-1, V)
    parts = [selected(z, y) for z, y in zip(logits.chunk(4), labels.view(-1).chunk(4))]
    return ratio(torch.cat(parts).view(B, T), old, mask)


@loop(B, T)
def a_loss_of_shifted_logits(hidden, weight, labels, old, mask):
    logits, labels = F.linear(hidden, weight)[:, :-1] / 0.7, labels[:, 1:]
    parts = [selected(z, y) for z, y in zip(logits, labels)]
    return ratio(torch.stack(parts), old[:, 1:], mask[:, 1:])


@loop(B, T)
def logsumexp_of_each_sequence(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight)
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return ratio(picked - torch.stack([row.logsumexp(-1) for row in logits]), old, mask)


@loop(N)
def entropy_in_blocks(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    spread = torch.cat([entropy(z) for z in logits.split(6)])
    return ratio(selected(logits, labels), old, mask) - 0.01 * (spread * mask).sum()


@loop(N)
def both_in_blocks_of_their_own(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    spread = torch.cat([entropy(z) for z in logits.split(6)])
    logp = torch.cat([selected(z, y) for z, y in zip(logits.split(8), labels.split(8))])
    return ratio(logp, old, mask) - 0.01 * (spread * mask).sum()


@loop(N)
def a_buffer_that_is_filled(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    logp = torch.zeros(N)
    for s in range(0, N, 8):
        logp[s : s + 8] = selected(logits[s : s + 8], labels[s : s + 8])
    return ratio(logp, old, mask)


@loop(N)
def buffers_in_a_buffer(hidden, weight, labels, old, mask):
    logits, logp = hidden @ weight.t(), torch.zeros(N)
    for i, (z, y) in enumerate(zip(logits.split(T), labels.split(T))):
        rows = torch.zeros(T)
        for s in range(0, T, 3):
            rows[s : s + 3] = selected(z[s : s + 3], y[s : s + 3])
        logp[i * T : (i + 1) * T] = rows
    return ratio(logp, old, mask)


@loop(N)
def distributions_in_blocks(hidden, weight, labels, old, mask):
    logp = torch.cat([z.float().log_softmax(-1) for z in (hidden @ weight.t()).split(8)])
    return ratio(logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), old, mask)


@loop(N)
def a_block_that_is_read_again(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    parts = [selected(z, y) for z, y in zip(logits.split(8), labels.split(8))]
    return ratio(torch.cat(parts), old, mask), parts[0].detach().mean(), parts[-1].detach()


@loop(N)
def pieces_with_a_temperature_each(hidden, weight, labels, old, mask):
    logits, temperature = hidden @ weight.t(), (mask + 0.5).unsqueeze(-1)
    blocks = zip(logits.split(8), labels.split(8), temperature.split(8))
    return ratio(torch.cat([selected(z / t, y) for z, y, t in blocks]), old, mask)


@loop(B, T)
def soft_capped_sequences(hidden, weight, labels, old, mask):
    logits = F.linear(hidden, weight)
    parts = [selected(3 * torch.tanh(z / 3), y) for z, y in zip(logits, labels)]
    return ratio(torch.stack(parts), old, mask)


NOT_JOINED_WHEN_DYNAMIC = ("flat_blocks_of_a_batch",)
"""The size of a block is a quotient of two sizes: in two passes, as a loop."""


@pytest.mark.sample(3, only="dynamic")
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "automatic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_runs_in_one_pass(name: str, dtype: torch.dtype, dynamic: bool | None) -> None:
    function, shape = LOOPS[name]
    facts = harness.check(function, inputs(shape, dtype), dynamic=dynamic)
    expected = (1, 3) if dynamic is False or name not in NOT_JOINED_WHEN_DYNAMIC else (2, 4)
    assert (facts.regions, facts.matmuls) == expected, harness.reasons(facts.reports)
    assert not facts.leftovers


# ---------------------------------------------------------------- near misses: right, and not joined


def weighted(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Linear in the log-probs: ratios would blow up the rounding of products of other sizes."""
    return (logp * old * mask).sum()


def some_rows(hidden, weight, labels, old, mask):
    """The last block is left out."""
    logits = hidden @ weight.t()
    parts = [selected(z, y) for z, y in list(zip(logits.split(8), labels.split(8)))[:-1]]
    logp = torch.cat(parts)
    return weighted(logp, old[: len(logp)], mask[: len(logp)])


def out_of_order(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    parts = [selected(z, y) for z, y in zip(logits.split(7), labels.split(7))]
    return weighted(torch.cat(parts[::-1]), old, mask)


def other_labels(hidden, weight, labels, old, mask):
    """Blocks of logits with labels that are not the same rows'."""
    logits = hidden @ weight.t()
    parts = [selected(z, y) for z, y in zip(logits.split(7), labels.split(7)[::-1])]
    return weighted(torch.cat(parts), old, mask)


def one_block_is_different(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    parts = [selected(z / (1 + i), y) for i, (z, y) in enumerate(zip(logits.split(7), labels.split(7)))]
    return weighted(torch.cat(parts), old, mask)


def overlapping(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    parts = [selected(logits[s : s + 8], labels[s : s + 8]) for s in (0, 7, 13)]
    return torch.cat(parts).exp().sum()


def blocks_that_share_a_maximum(hidden, weight, labels, old, mask):
    """Every block reads what is computed from the first."""
    logits = hidden @ weight.t()
    blocks = logits.split(7)
    shift = blocks[0].detach().amax()
    parts = [selected(z - shift, y) for z, y in zip(blocks, labels.split(7))]
    return weighted(torch.cat(parts), old, mask)


def rows_of_one_column(hidden, weight, labels, old, mask):
    """A scale that differs from block to block and is no row of anything."""
    logits = hidden @ weight.t()
    scales = mask[:3] + 1
    parts = [selected(z * scales[i], y) for i, (z, y) in enumerate(zip(logits.split(7), labels.split(7)))]
    return weighted(torch.cat(parts), old, mask)


def labels_along_another_dimension(hidden, weight, labels, old, mask):
    """The second block is gathered from down its columns."""
    logits = hidden @ weight.t()
    index = labels[:7, None] % 7
    return (torch.cat([logits[:7].gather(1, index), logits[7:14].gather(0, index), logits[14:].gather(1, index)])).sum()


def sums_along_another_dimension(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    running = torch.cat([block.cumsum(1 - i % 2) for i, block in enumerate(logits.split(7))])
    return weighted(running[:, 3], old, mask)


def squares_turned_in_turn(hidden, weight, labels, old, mask):
    """Square pieces, of which one is transposed."""
    squares = (hidden @ weight.t())[:, :7].split(7)
    return weighted(torch.cat([squares[0], squares[1].t(), squares[2]]).logsumexp(-1), old, mask)


def buffers_added_with_a_factor(hidden, weight, labels, old, mask):
    logits = hidden @ weight.t()
    first, second = torch.zeros(N), torch.zeros(N)
    first[:10] = selected(logits[:10], labels[:10])
    second[10:] = selected(logits[10:], labels[10:])
    return weighted(torch.add(first, second, alpha=3), old, mask)


@pytest.mark.parametrize(
    "function",
    [
        some_rows, out_of_order, other_labels, one_block_is_different, overlapping, blocks_that_share_a_maximum,
        rows_of_one_column, labels_along_another_dimension, sums_along_another_dimension, squares_turned_in_turn,
        buffers_added_with_a_factor,
    ],
)  # fmt: skip
def test_what_is_no_whole_loop_is_right(function: Loss) -> None:
    facts = harness.check(function, inputs((N,)), rewritten=False)
    assert "INTERNAL" not in harness.codes(facts.reports)


def test_a_loop_that_is_not_of_logits_stays() -> None:
    """What the user computes in pieces elsewhere, to save memory, stays in pieces."""

    def function(hidden, weight, labels, old, mask, mixer):
        hidden = torch.cat([torch.tanh(h @ mixer) for h in hidden.split(7)])
        return ratio(selected(hidden @ weight.t(), labels), old, mask)

    mixer = (torch.randn(H, H) / 4).requires_grad_()
    with inductor_grpo.capture() as captured:
        facts = harness.check(function, (*inputs((N,)), mixer))
    assert (facts.regions, facts.matmuls) == (1, 3)
    after = next(s.graph for g in captured.graphs for s in g.stages if s.name == "rewritten")
    assert [n.target for n in after.nodes].count(torch.ops.aten.tanh.default) == 3
