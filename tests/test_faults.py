"""Fault classes from public issue trackers: equal to eager, or raising what eager raises, in many ragged chunks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests import harness
from tests.corpus.faults import CASES, SEQUENCES, Case

CHUNK_BYTES = 5 * 37 * 4

# They change the state of the whole process: inference mode breaks torch.compile for what follows, the other one
# starts a process group.
ALONE = ("grad_inference_mode", "grad_dtensor_mixed")

# What has no head to stream, or must keep its logits: right is enough.
NOT_STREAMED = {
    "form_logits_also_returned",  # logits are an output
    "form_full_distribution_out",  # so is the whole distribution
    "size_vocab_1",  # no vocabulary to speak of
    "size_vocab_2",
    "size_hidden_1",  # the product is elementwise by the time that a pass sees it
    "size_tokens_0",
    "grad_double_backward",
    "prec_fp16_extreme",  # three words
    "prec_rare_token",  # one token: its weight gradient is an elementwise product, not a matmul
    "near_softmax_dim0",  # mixes rows
    "near_transposed_logits",
}
GROUPS_WITH_HEADS = ("form", "near", "scale", "precision", "nonfinite", "index", "stride", "autograd", "size")


def outcome(case: Case) -> None:
    """Asserts that the compiled case does what eager does."""
    function, args, kwargs, _ = case.build()
    backward = not case.own_backward
    chunked = harness.compiled(function, CHUNK_BYTES)
    if case.raises is not None:
        with pytest.raises(case.raises) as raised:
            harness.run(chunked, args, kwargs, backward=backward)
        # One of ours would be wrapped as a failure of the backend.
        assert not isinstance(raised.value, torch._dynamo.exc.BackendCompilerFailed), raised.value
        return
    eager = harness.run(function, args, kwargs, backward=backward)
    # Shapes have no error to measure.
    truth = eager if case.device == "meta" else harness.run(function, args, kwargs, backward=backward, wide=True)
    facts = streamed_facts(case, args)
    with harness.recording(facts):
        ours = harness.run(chunked, args, kwargs, backward=backward)
    found = harness.problems(ours, eager, truth, harness.floor((args, kwargs)))
    assert not found, "\n".join(found)
    assert "INTERNAL" not in harness.codes(facts.reports), harness.reasons(facts.reports)
    if (
        harness.BACKEND == harness.NAMESPACE
        and case.group in GROUPS_WITH_HEADS
        and case.id not in NOT_STREAMED
        and case.device != "meta"
    ):
        harness.assert_streamed(facts)


def streamed_facts(case: Case, args: tuple[object, ...]) -> harness.Graphs:
    """V is the vocabulary of the case's weight: its largest two-dimensional floating argument by rows."""
    if case.group not in GROUPS_WITH_HEADS:
        return harness.Graphs(frozenset(), frozenset())
    matrices = [
        a for a in harness.tensors(args)[1:] if a.dim() == 2 and (a.is_floating_point() or a.dtype == torch.int8)
    ]
    matrices = matrices or [a for a in harness.tensors(args) if a.dim() == 2]
    weight = max(matrices, key=lambda matrix: matrix.shape[0] if matrix.shape[0] != 13 else 0)
    features = {weight.shape[1], 16, 4, 1}
    return harness.Graphs(frozenset({weight.shape[0]}), frozenset(features))


@pytest.mark.parametrize("id", [id for id in CASES if id not in (*ALONE, "grad_double_backward")])
def test_case(id: str) -> None:
    outcome(CASES[id])


@pytest.mark.parametrize("id", ALONE)
def test_case_alone(id: str) -> None:
    code = f"from tests.test_faults import outcome, CASES; outcome(CASES[{id!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    # torch.compile itself cannot trace inference tensors that a function makes inside inference_mode.
    if not (id == "grad_inference_mode" and "Cannot set version_counter for inference tensor" in done.stderr):
        assert done.returncode == 0, done.stderr[-3000:]


def test_double_backward_is_right_or_says_so() -> None:
    function, args, kwargs, _ = CASES["grad_double_backward"].build()
    eager = harness.run(function, args, kwargs, backward=False)
    truth = harness.run(function, args, kwargs, backward=False, wide=True)
    try:
        ours = harness.run(harness.compiled(function, CHUNK_BYTES), args, kwargs, backward=False)
    except RuntimeError as error:
        assert "double backward" in str(error)
    else:
        assert not harness.problems(ours, eager, truth, harness.floor(args))


@pytest.mark.parametrize("id", SEQUENCES)
def test_sequence(id: str) -> None:
    function, calls, _ = SEQUENCES[id].build()
    chunked = harness.compiled(function, CHUNK_BYTES, dynamic=None)
    for number, (args, kwargs) in enumerate(calls):
        eager, truth = harness.run(function, args, kwargs), harness.run(function, args, kwargs, wide=True)
        ours = harness.run(chunked, args, kwargs)
        found = harness.problems(ours, eager, truth, harness.floor((args, kwargs)))
        assert not found, f"call {number}: " + "\n".join(found)
