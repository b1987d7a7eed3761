"""The harness can fail: wrong values, a wrong gradient, an unstreamed region and a leftover are all noticed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import harness
from tests.corpus.variants import VARIANTS


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, weight).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def arguments(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return VARIANTS["LP01"].factory("cpu", dtype, True)


def compare(function: harness.Function, dtype: torch.dtype = torch.float32) -> list[str]:
    args = arguments(dtype)
    eager, truth = harness.run(log_probs, args), harness.run(log_probs, args, wide=True)
    return harness.problems(harness.run(function, args), eager, truth, harness.floor(args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_passes_its_own_rule(dtype: torch.dtype) -> None:
    assert compare(log_probs, dtype) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_values_are_noticed(dtype: torch.dtype) -> None:
    slightly_hot = compare(lambda h, w, y: log_probs(h, w, y) * 1.03, dtype)
    assert [line.split(":")[0] for line in slightly_hot] == ["output 0", "gradient 0", "gradient 1"]


def test_a_wrong_gradient_alone_is_noticed() -> None:
    def detached(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        lp = log_probs(h, w, y)
        return lp.detach() + (lp - lp.detach()) * 1.001

    assert [line.split(":")[0] for line in compare(detached)] == ["gradient 0", "gradient 1"]


def test_missing_gradients_dtypes_and_nans_are_noticed() -> None:
    assert "gradient 1: missing" in compare(lambda h, w, y: log_probs(h, w.detach(), y))
    assert compare(lambda h, w, y: log_probs(h, w, y).double())[0].startswith("output 0: torch.float64")
    holes = compare(lambda h, w, y: log_probs(h, w, y).masked_fill(y == y[0, 0], float("nan")))
    assert holes[0] == "output 0: non-finite pattern differs from eager"


def test_an_unstreamed_region_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no region rewritten"):
        harness.check(log_probs, arguments(), min_logits_bytes=1 << 60)


def test_leftovers_of_an_untouched_graph_are_noticed() -> None:
    args = arguments()
    facts = harness.graph_facts(args)
    with harness.recording(facts):
        harness.run(harness.compiled(log_probs, min_logits_bytes=1 << 60), args)
    left = "\n".join(facts.leftovers)
    assert "mm" in left and "exp" in left, left
    assert "[16, 41]" not in left and "[41, 16]" not in left, "a weight or its gradient is no leftover"


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ([14, 41], True),
        ([2, 7, 41], True),
        ([41, 14], True),
        ([574], True),
        ([5, 41], True),
        ([2, 7, 5, 41], True),
        ([41, 16], False),
        ([16, 41], False),
        ([41], False),
        ([1, 41], False),
        ([656], False),  # a weight, flattened
        ([2, 7, 16], False),
        ([0, 41], False),
        ([41, 41], True),
    ],
)
def test_what_counts_as_a_leftover(shape: list[int], left: bool) -> None:
    facts = harness.Graphs(frozenset({41}), frozenset({16}))
    assert harness.is_leftover(shape, facts) is left


def test_the_reference_widens_casts_inside_the_function_and_its_checkpoints() -> None:
    for id in ("LP26", "LP34", "LP46", "ENT09"):
        args = VARIANTS[id].factory("cpu", torch.bfloat16, True)
        truth = harness.run(VARIANTS[id].function, args, wide=True)
        assert truth.outputs[0].dtype == torch.float64, id
        again = harness.run(VARIANTS[id].function, harness.fresh(args, wide=True), wide=True)
        assert torch.equal(truth.outputs[0], again.outputs[0])


def test_fresh_arguments_keep_values_strides_and_leaves() -> None:
    base = torch.randn(6, 8)
    args = (base[::2], base.t(), [torch.arange(3), 4], {"p": torch.nn.Parameter(base)})
    copy = harness.fresh(args)
    for old, new in zip(harness.tensors(args), harness.tensors(copy), strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride() and old.requires_grad == new.requires_grad
        assert old.data_ptr() != new.data_ptr() and new.is_leaf
