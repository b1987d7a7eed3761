"""Heads that are split over GPUs, by NCCL, over as many as there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.test_parallel import CASES, Jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dist.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = [*CASES, "mixed: verl", "generated code"]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """A process for each GPU."""
    running = Jobs(torch.cuda.device_count(), "nccl")
    yield running
    running.close()


@pytest.mark.parametrize("job", NAMES)
def test_job(job: str, jobs: Jobs) -> None:
    problems = jobs.problems(job)
    assert not problems, "\n".join(problems)
