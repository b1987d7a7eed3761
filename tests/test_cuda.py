"""The corpus on a GPU: right by the same rule, streamed by the same counts; a few through generated kernels."""

from __future__ import annotations

import os

import pytest
import torch

from tests import harness
from tests.corpus.variants import VARIANTS
from tests.test_corpus import EXPECTED_REJECTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
# Code generation takes seconds a variant: a few, or all of them when asked.
GENERATED = list(VARIANTS) if os.environ.get("GRPO_TEST_GENERATED") == "all" else ["LP02", "LPE07", "GRPO01", "LP25"]


@pytest.fixture(autouse=True)
def exact_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 yardstick measures rounding, not tf32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("id", VARIANTS)
def test_variant(id: str, dtype: torch.dtype) -> None:
    variant = VARIANTS[id]
    harness.check(variant.function, variant.factory("cuda", dtype, True), rewritten=id not in EXPECTED_REJECTIONS)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("id", GENERATED)
def test_generated(id: str, dtype: torch.dtype) -> None:
    """Through Inductor, chunk bodies and all."""
    variant = VARIANTS[id]
    args = variant.factory("cuda", dtype, True)
    harness.check(
        variant.function, args, rewritten=id not in EXPECTED_REJECTIONS, codegen="inductor", disable=["tiles"]
    )


@pytest.mark.parametrize("id", GENERATED)
def test_generated_tiles(id: str) -> None:
    """The same over vocabulary tiles, where a pattern takes them."""
    variant = VARIANTS[id]
    args = variant.factory("cuda", torch.bfloat16, True)
    harness.check(variant.function, args, rewritten=id not in EXPECTED_REJECTIONS, codegen="inductor")
