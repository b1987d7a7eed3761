"""All-reduces between sums and segment expressions: fused on both sides, one rank's numbers.

Segments are split over the ranks at arbitrary tokens; every rank holds some tokens of most segments.  One group
(sequence parallel), or two, of which the second holds whole copies of a piece (sequence parallel beside data parallel).
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.corpus import seams

TOKENS, SEGMENTS = 96, 7


def loss_of(new, old, adv, ids, mask, count, reduce):
    """GSPO's loss of this rank's tokens; ``reduce`` adds a tensor up over the ranks."""
    weight = mask.to(new.dtype)
    total = new.new_zeros(count).index_add_(0, ids, (new - old) * weight)
    tokens = new.new_zeros(count).index_add_(0, ids, weight)
    total, tokens = reduce(total), reduce(tokens)
    ratio = (total / tokens.clamp(min=1)).exp()
    losses = seams.clipped(ratio[ids], adv) * weight
    return losses.sum() / 11.0, ratio.detach()


def functional(groups: Any) -> Any:
    from torch.distributed._functional_collectives import all_reduce

    def reduce(x):
        for group in groups:
            x = all_reduce(x, "sum", group)
        return x

    return reduce


def in_place(groups: Any) -> Any:
    """``dist.all_reduce``, which autograd does not see."""

    def reduce(x):
        x = x.detach().clone()
        for group in groups:
            dist.all_reduce(x, group=group)
        return x

    return reduce


def inputs() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(5)
    new, old, adv = (torch.randn(TOKENS, generator=g) * 0.3 for _ in range(3))
    ids = torch.randint(0, SEGMENTS, (TOKENS,), generator=g).sort().values
    return new, old, adv, ids, torch.rand(TOKENS, generator=g) > 0.2


def pieces(world: int) -> list[slice]:
    """Uneven, and not at the ends of segments."""
    cuts = [0, *(TOKENS * (i + 1) // world - 3 * (i % 2) for i in range(world - 1)), TOKENS]
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def worker(rank: int, world: int, port: int, kind: str, failures: Any) -> None:
    try:
        run_rank(rank, world, port, kind)
    except BaseException as error:  # the parent shows it
        failures.put(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def run_rank(rank: int, world: int, port: int, kind: str) -> None:
    from inductor_grpo.backend import collected, inductor_grpo

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    sequence = world // 2 if kind == "two_groups" else world  # with two groups the tokens are split over both
    groups = [dist.group.WORLD]
    if kind == "two_groups":
        rows = [dist.new_group([r * sequence + i for i in range(sequence)]) for r in range(2)]
        columns = [dist.new_group([i, sequence + i]) for i in range(sequence)]
        groups = [rows[rank // sequence], columns[rank % sequence]]
    reduce = (in_place if kind == "in_place" else functional)(groups)
    whole = inputs()
    piece = pieces(world)[rank]

    reference = whole[0].double().requires_grad_()
    truth, ratios = loss_of(
        reference,
        *(x.double() if x.is_floating_point() else x for x in whole[1:]),
        SEGMENTS,
        (lambda x: x.detach()) if kind == "in_place" else (lambda x: x),
    )
    if truth.requires_grad:
        truth.backward()

    compiled = torch.compile(loss_of, backend=inductor_grpo, options={"grpo.codegen": "eager"}, fullgraph=True)
    new = whole[0][piece].clone().requires_grad_()
    with collected() as reports:
        loss, found = compiled(new, *(x[piece] for x in whole[1:]), SEGMENTS, reduce)
        if loss.requires_grad:
            loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total.double(), truth.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), ratios, rtol=1e-5, atol=1e-6)
    if truth.requires_grad:
        assert reference.grad is not None and new.grad is not None
        torch.testing.assert_close(new.grad.double(), reference.grad[piece], rtol=1e-5, atol=1e-6)
    fused = [r for report in reports for r in report.rewrites if r.pattern == "segment_sums"]
    assert len(fused) >= (1 if kind == "in_place" else 2), reports
    assert not any(rejection.code == "INTERNAL" for report in reports for rejection in report.rejections)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.sample(2)
@pytest.mark.skipif(not dist.is_available() or sys.platform != "linux", reason="needs gloo")
@pytest.mark.parametrize(("world", "kind"), [(2, "one_group"), (4, "one_group"), (4, "two_groups"), (2, "in_place")])
def test_all_reduce_in_the_middle(world: int, kind: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    failures = context.Queue()
    processes = [context.Process(target=worker, args=(r, world, port, kind, failures)) for r in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    found = [failures.get() for _ in range(failures.qsize())]
    assert all(process.exitcode == 0 for process in processes), found
