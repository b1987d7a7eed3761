"""Heads that are split over ranks: streamed, right by the accuracy rule, and with eager's collectives in eager's order.

All cases run in one group of two processes, since a process takes longer to start than a case to run.
"""

from __future__ import annotations

import collections
import functools
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import harness, parallel_cases, parallel_modules
from tests.parallel_cases import CASES, Case, Part

pytestmark = pytest.mark.skipif(not dist.is_available() or sys.platform != "linux", reason="needs gloo")


# ---------------------------------------------------------------- in the processes


def device() -> torch.device:
    """Of this rank's tensors."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def sizes_of(case: Case) -> list[int]:
    """The vocabulary of each rank."""
    return [parallel_cases.V + 4 * (r % 2) * case.uneven for r in range(dist.get_world_size())]


def arguments(case: Case, rank: int) -> list[Any]:
    """This rank's arguments of a case."""
    given = parallel_cases.tensors(rank, sizes_of(case))
    found = []
    for name in case.takes:
        x = given[name]
        wants = x.requires_grad and case.backward and not (case.frozen and name != "hidden")
        if case.extreme and name == "hidden":
            scales = [1.0, 100.0, 1e4, 0.0, torch.inf, -torch.inf, torch.nan, 1e30]
            x = x.detach() * torch.tensor(scales).repeat(parallel_cases.N // len(scales)).unsqueeze(-1)
        if case.extreme and name == "weight":
            x = x.detach() * 10.0 ** (rank - 1)
        if name == "hidden":
            x = x.reshape(*case.shape, -1)
        if name in ("labels", "advantages"):
            x = x.reshape(case.shape)
        if x.is_floating_point():
            x = x.detach().to(case.dtype)
        found.append(x.to(device()).requires_grad_(wants))
    return found


def part_of(case: Case, rank: int) -> Part:
    """What this rank has of the vocabulary."""
    return Part(dist.group.WORLD, sum(sizes_of(case)[:rank]))


def collectives(run: Callable[[], Any]) -> int:
    """How many calls the process group makes."""
    count = dist.group.WORLD._get_sequence_number_for_group
    before = count()
    run()
    return count() - before


def check(case: Case, rank: int, rewritten: bool = True, **more: Any) -> list[str]:
    """What is wrong with a case on this rank."""
    args, part = arguments(case, rank), part_of(case, rank)

    def function(*args: Any) -> Any:
        return case.function(*args, part)

    eager = harness.run(function, args, backward=case.backward)
    truth = harness.run(function, args, backward=case.backward, wide=True)
    width = args[1].shape[0]
    facts = harness.graph_facts(args)
    compiled = harness.compiled(function, 5 * width * args[1].element_size(), dynamic=None, fullgraph=True, **more)
    # With generated code the caches stay on, so that one rank takes over what the other has compiled.
    recorded = harness.collecting() if more.get("codegen") == "inductor" else harness.recording(facts)
    with recorded as seen:
        ours = harness.run(compiled, args, backward=case.backward)
    if isinstance(seen, list):
        facts.reports += seen
        facts.matmuls = sum(rewrite.matmuls for report in seen for rewrite in report.rewrites)
    found = harness.problems(ours, eager, truth, harness.floor(args))
    found += [reason for reason in harness.codes(facts.reports) if reason == "INTERNAL"]
    if rewritten:
        found += facts.leftovers
        if facts.matmuls != case.matmuls:
            found.append(f"{facts.matmuls} matmuls{harness.reasons(facts.reports)}")
        names = [rewrite.pattern for report in facts.reports for rewrite in report.rewrites]
        if names.count("segment_sums") < case.seams or len(names) == names.count("segment_sums"):
            found.append(f"rewritten {names}{harness.reasons(facts.reports)}")
    expected = collectives(lambda: harness.run(function, args, backward=case.backward))
    made = collectives(lambda: harness.run(compiled, args, backward=case.backward))
    if not expected or made != expected:
        found.append(f"{made} collectives, eager makes {expected}")
    return found


def mixed(name: str, rank: int) -> list[str]:
    """One rank streams and the other does not, as where their parts differ in size: the calls must still match."""
    if rank == 0:
        return check(CASES[name], rank)
    return check(CASES[name], rank, rewritten=False, disable="engine")


def refused(rank: int) -> list[str]:
    """Logits that are sent to other ranks stay; the report names the line and what to send instead."""
    case = Case(parallel_cases.gathered)
    found = check(case, rank, rewritten=False)
    with harness.collecting() as reports:
        harness.run(harness.compiled(lambda *args: case.function(*args, part_of(case, rank))), arguments(case, rank))
    rejection = next(r for report in reports for r in report.rejections)
    text, line = str(rejection), inspect.getsourcelines(parallel_cases.gathered)[1] + 2
    if rejection.code != "NO_ROW_RULE" or f"parallel_cases.py:{line}" not in text or "send values a token" not in text:
        found.append(text)
    return found


JOBS: dict[str, Callable[[int], list[str]]] = {
    **{name: functools.partial(check, case) for name, case in CASES.items()},
    "mixed: in chunks": functools.partial(mixed, "in chunks"),
    "mixed: verl": functools.partial(mixed, "verl"),
    "refused": refused,
    "fsdp": lambda rank: parallel_modules.check(parallel_modules.fsdp, rank, parallel_modules.V),
    "ddp": lambda rank: parallel_modules.check(parallel_modules.ddp, rank, 1502, counted=False),
    "dtensor, gathered": lambda rank: parallel_modules.check(parallel_modules.gathered, rank, parallel_modules.V),
    "dtensor, split": lambda rank: parallel_modules.check(parallel_modules.split, rank, parallel_modules.V // 2),
    "generated code": functools.partial(check, CASES["functional"], codegen="inductor"),
}


def worker(rank: int, world: int, backend: str, port: int, names: list[str], results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world)
    for name in names:
        try:
            found = JOBS[name](rank)
        except Exception:
            found = [traceback.format_exc()]
        results.put((name, [f"rank {rank}: {problem}" for problem in found]))
        torch._dynamo.reset()
        dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- outside


def run_jobs(names: list[str], world: int, backend: str) -> dict[str, list[str]]:
    """What is wrong with each job, on all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(r, world, backend, port, names, queue)) for r in range(world)]
    for process in processes:
        process.start()
    found: dict[str, list[str]] = collections.defaultdict(list)
    seen = collections.Counter[str]()
    try:
        while sum(seen.values()) < world * len(names):
            name, problems = queue.get(timeout=200)
            seen[name] += 1
            found[name] += problems
    except Empty:
        for name in names:
            found[name] += ["no answer"] * (seen[name] < world)
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.terminate()
    return found


def selected(request: pytest.FixtureRequest) -> list[str]:
    """The jobs that the tests of this file were asked for."""
    mine = [item for item in request.session.items if item.path == request.node.path]
    return [item.callspec.params["job"] for item in mine if hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What is wrong with each job that was selected."""
    return run_jobs(selected(request), 2, "gloo")


@pytest.mark.parametrize("job", JOBS)
def test_job(job: str, results: dict[str, list[str]]) -> None:
    assert not results[job], "\n".join(results[job])
