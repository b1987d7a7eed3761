"""Modules whose parameters are spread over ranks, for ``tests/test_parallel.py``: FSDP2, DTensor, DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import harness

N, H, V = 24, 8, 62


class HeadAndLoss(nn.Module):
    """The last unit of a model, with its loss: what ``fully_shard`` is given."""

    def __init__(self, inner: int = H, vocabulary: int = V) -> None:
        super().__init__()
        self.layer = nn.Linear(inner, inner)
        self.lm_head = nn.Linear(inner, vocabulary, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
        logits = self.lm_head(torch.tanh(self.layer(hidden))).float()
        logp = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return -(logp * advantages).mean()


def module(wide: bool, inner: int = H, vocabulary: int = V) -> HeadAndLoss:
    """The same parameters on all ranks."""
    torch.manual_seed(2)
    made = HeadAndLoss(inner, vocabulary)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float32) * inner**-0.5)
    return made.double() if wide else made


def inputs(rank: int, wide: bool, inner: int = H, vocabulary: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Other tokens on each rank."""
    g = torch.Generator().manual_seed(20 + rank)
    hidden, advantages = (torch.randn(*s, generator=g, dtype=torch.float32) for s in ((N, inner), (N,)))
    labels = torch.randint(0, vocabulary, (N,), generator=g)
    if wide:
        hidden, advantages = hidden.double(), advantages.double()
    return hidden.requires_grad_(), labels, advantages


def whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


Step = Callable[[], Tensor]
Built = tuple[Step, list[Tensor]]
"""Computes a loss; what has gradients then."""
Build = Callable[[int, DeviceMesh, bool, "Callable[[Any], Any] | None"], Built]


def fsdp(rank: int, mesh: DeviceMesh, wide: bool, compiled: Callable[[Any], Any] | None) -> Built:
    """The unit is compiled, and its weights are gathered around what was compiled."""
    from torch.distributed.fsdp import fully_shard

    made, args = module(wide), inputs(rank, wide)
    if compiled:
        made.forward = compiled(made.forward)  # type: ignore[method-assign]
    fully_shard(made, mesh=mesh)
    return lambda: made(*args), [args[0], *made.parameters()]


def ddp(rank: int, mesh: DeviceMesh, wide: bool, compiled: Callable[[Any], Any] | None) -> Built:
    """The wrapped module is compiled; its optimizer cuts the graph into one for each bucket of gradients."""
    args = inputs(rank, wide, 600, 1502)
    made = nn.parallel.DistributedDataParallel(module(wide, 600, 1502), bucket_cap_mb=1)
    step = compiled(made) if compiled else made
    return lambda: step(*args), [args[0], *made.parameters()]


def gathered(rank: int, mesh: DeviceMesh, wide: bool, compiled: Callable[[Any], Any] | None) -> Built:
    """A weight as a DTensor, gathered inside of the compiled function."""
    hidden, labels, advantages = inputs(rank, wide)
    weight = nn.Parameter(distribute_tensor(module(wide).lm_head.weight.detach(), mesh, [Shard(0)]))

    def loss(hidden: Tensor, weight: Any, labels: Tensor, advantages: Tensor) -> Tensor:
        logits = (hidden @ weight.full_tensor().t()).float()
        logp = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return -(logp * advantages).mean()

    step = compiled(loss) if compiled else loss
    return lambda: step(hidden, weight, labels, advantages), [hidden, weight]


def split(rank: int, mesh: DeviceMesh, wide: bool, compiled: Callable[[Any], Any] | None) -> Built:
    """A head that is split over the vocabulary as a DTensor, under ``loss_parallel``."""
    from torch.distributed.tensor.parallel import loss_parallel

    hidden, labels, _ = inputs(0, wide)
    hidden = nn.Parameter(distribute_tensor(hidden.detach(), mesh, [Replicate()]))
    weight = nn.Parameter(distribute_tensor(module(wide).lm_head.weight.detach(), mesh, [Shard(0)]))

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    step = compiled(loss) if compiled else loss

    def run() -> Tensor:
        with loss_parallel():
            result = step(hidden, weight, labels)
            result.backward()
        return result.detach()

    return run, [hidden, weight]


def run(build: Build, rank: int, wide: bool, compiled: Callable[[Any], Any] | None) -> tuple[harness.Run, int]:
    """Loss and gradients of the second step, and how many collectives it takes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = dist.group.WORLD._get_sequence_number_for_group
    with harness.widened() if wide else contextlib.nullcontext():
        step, leaves = build(rank, mesh, wide, compiled)
        for _ in range(3):  # the second rebuilds DDP's buckets
            for leaf in leaves:
                leaf.grad = None
            before = count()
            loss = step()
            if loss.requires_grad:
                harness.run_backward(loss)
            after = count()
    found = [whole(x) for x in (loss.detach(), *(leaf.grad for leaf in leaves))]
    assert found[0] is not None
    return harness.Run([found[0]], found[1:]), after - before


def check(build: Build, rank: int, width: int, counted: bool = True) -> list[str]:
    """What is wrong with a module: wrong by the accuracy rule, not streamed, or other collectives than eager's
    (``counted``; DDP has other buckets when it is compiled)."""
    eager, expected = run(build, rank, False, None)
    truth, _ = run(build, rank, True, None)

    def compiled(function: Any) -> Any:
        return harness.compiled(function, 5 * width * 4, dynamic=None)

    with harness.collecting() as reports:
        ours, made = run(build, rank, False, compiled)
    found = harness.problems(ours, eager, truth, harness.FLOOR[torch.float32])
    if not any(report.rewrites for report in reports):
        found.append(f"not rewritten{harness.reasons(reports)}")
    if counted and (not expected or made != expected):
        found.append(f"{made} collectives, eager makes {expected}")
    return found
