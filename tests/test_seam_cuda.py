"""The seam on CUDA: every spelling, through generated code too, and how many kernels it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from inductor_grpo.patterns.segment_sums import weighted_by_label_count
from inductor_grpo.tools.bench_seam import make_inputs, step_of
from tests import harness
from tests.corpus import seams
from tests.corpus.faults import CASES
from tests.corpus.variants import VARIANTS
from tests.test_seam import CORPUS, FAULTS, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CODEGEN = ["eager", "inductor"]


def moved(args: Any) -> Any:
    def one(x: Any) -> Any:
        return x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tree_map(one, args)


@pytest.mark.parametrize("codegen", CODEGEN)
@pytest.mark.parametrize("id", CORPUS)
def test_corpus(id: str, codegen: str) -> None:
    variant = VARIANTS[id]
    facts = check(variant.function, variant.factory("cuda", torch.float32, True), None, codegen=codegen)
    assert facts.seam_calls >= 1 and facts.segment_sums == CORPUS[id][1]


@pytest.mark.parametrize("id", [id for id in FAULTS if id not in ("gspo_n_from_tensor", "gspo_form_scatter_add")])
def test_fault(id: str) -> None:
    function, args, kwargs, _ = CASES[id].build()
    with torch.device("cuda"):  # for the buffers that the cases make
        facts = check(function, moved(args), None, moved(kwargs))
    assert facts.segment_sums == FAULTS[id][1]


@pytest.mark.parametrize("codegen", CODEGEN)
@pytest.mark.parametrize("name", seams.SPELLINGS)
def test_spelling(name: str, codegen: str) -> None:
    function, args, expected = seams.SPELLINGS[name]()
    facts = check(function, moved(args), None, codegen=codegen)
    assert facts.segment_sums == expected[1]


@pytest.mark.parametrize(("tokens", "segments", "kind"), [(8192, 64, ""), (131072, 512, ""), (131072, 512, "unequal")])
def test_four_kernels_and_the_same_bits(tokens: int, segments: int, kind: str) -> None:
    args = make_inputs(tokens, segments, kind, "cuda")
    step = step_of(torch.compile(weighted_by_label_count, backend=harness.backend()), args)
    first = [x.clone() for x in step()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, step()))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) <= 4, names  # one of them is loss.backward(), which fills its first gradient


def test_in_a_cuda_graph() -> None:
    args = make_inputs(8192, 64, "", "cuda")
    expected = [x.clone() for x in step_of(weighted_by_label_count, args)()]
    compiled = torch.compile(weighted_by_label_count, backend=harness.backend(), mode="reduce-overhead")
    step = step_of(compiled, args)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in step()]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
