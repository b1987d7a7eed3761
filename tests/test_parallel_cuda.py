"""Heads that are split over GPUs, by NCCL, over as many as there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.test_parallel import CASES, run_jobs, selected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dist.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = [*CASES, "mixed: in chunks", "mixed: verl", "generated code"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What is wrong with each job that was selected."""
    return run_jobs(selected(request), torch.cuda.device_count(), "nccl")


@pytest.mark.parametrize("job", NAMES)
def test_job(job: str, results: dict[str, list[str]]) -> None:
    assert not results[job], "\n".join(results[job])
