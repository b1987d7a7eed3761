"""Every variant of the corpus: right, and streamed in forward and backward, or refused for the reason in the table."""

from __future__ import annotations

import functools

import pytest
import torch

from tests import harness
from tests.corpus.variants import VARIANTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# id -> the code that the report must give.  Whatever is not listed must be streamed.
EXPECTED_REJECTIONS = {
    "NEG01": "LOGITS_RETURNED",  # the logits are an output
    "LP48": "NO_HEAD",  # already streams slices of the vocabulary, none wider than the hidden size
}


@functools.cache
def reference(id: str, dtype: str) -> tuple[harness.Run, harness.Run]:
    """Eager in the dtype, and in float64."""
    variant = VARIANTS[id]
    args = variant.factory("cpu", DTYPES[dtype], True)
    return harness.run(variant.function, args), harness.run(variant.function, args, wide=True)


@pytest.mark.sample(3, only="dynamic")
@pytest.mark.parametrize("how", ["static", "static-rows", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", VARIANTS)
def test_variant(id: str, dtype: str, how: str) -> None:
    """Over tiles of the vocabulary where a pattern takes the region, and ("rows") by the engine's generic path
    alone."""
    variant = VARIANTS[id]
    args = variant.factory("cpu", DTYPES[dtype], True)
    refused = EXPECTED_REJECTIONS.get(id)
    facts = harness.check(
        variant.function,
        args,
        rewritten=refused is None,
        dynamic=how == "dynamic",
        reference=reference(id, dtype),
        disable=["tiles"] if how == "static-rows" else [],
    )
    if refused is not None:
        assert facts.leftovers or not facts.regions, f"{id} is streamed now: take it out of the table"
        assert refused in harness.codes(facts.reports), harness.reasons(facts.reports)


def test_the_two_dtypes_differ() -> None:
    """Guards against a corpus that ignores its dtype, and against outputs that are all zero."""
    for id in VARIANTS.keys() - {"LP46"}:  # under autocast: bf16 either way
        exact, coarse = (reference(id, dtype)[0] for dtype in DTYPES)
        assert exact.outputs[0].abs().double().sum() > 0, id
        values = zip([*exact.outputs, *exact.gradients], [*coarse.outputs, *coarse.gradients])
        assert any(a is not None and b is not None and not torch.equal(a.double(), b.double()) for a, b in values), id


def table() -> str:
    """One line a variant: graphs, regions, matmuls, as compiled today; ``python -m tests.test_corpus`` prints it."""
    lines = [f"{'id':10s} graphs regions matmuls  left"]
    for id, variant in VARIANTS.items():
        torch._dynamo.reset()
        args = variant.factory("cpu", torch.float32, True)
        try:
            facts = harness.check(variant.function, args, rewritten=False, reference=reference(id, "fp32"))
        except Exception as failure:  # a table of everything, failures included
            lines.append(f"{id:10s} {type(failure).__name__}: {str(failure).splitlines()[0][:90]}")
            continue
        left = len(facts.leftovers)
        lines.append(f"{id:10s} {facts.count:6d} {facts.regions:7d} {facts.matmuls:7d} {left:5d}")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
