"""Odd neighbours of the losses: equal to eager, or raising what eager raises, with the outcome pinned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import harness
from tests.corpus.odd import CASES, SEQUENCES, Case
from tests.corpus.odd.registry import entropy, head, log_prob
from tests.corpus.spellings import ids, normal

# Bounds of one buffer of logits.  At 64 bytes 41 words make three tiles; at 300 a chunk holds one row of them.
SMALL, LARGE = 64, 300
FAULTS = (IndexError, RuntimeError)


def outcome(reports: list[Any]) -> str:
    """What :attr:`Case.outcome` describes."""
    streamed = ["streamed"] if any(report.rewrites for report in reports) else []
    return " ".join(streamed + sorted(set(harness.codes(reports)))) or "nothing"


def observed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` that also returns its arguments as they are afterwards: writes to them are results too."""

    def call(*args: Any) -> Any:
        outputs = function(*args)
        return outputs, [arg.detach().clone() for arg in harness.tensors(args)]

    return call


def facts(case: Case, args: tuple[Any, ...]) -> harness.Graphs:
    """V and H from the second argument; no vocabulary where sizes do not tell it from the rest."""
    if case.whole or case.outcome != "streamed":
        return harness.Graphs(frozenset(), frozenset())
    return harness.graph_facts(args)


def assert_outcome(expected: str, reports: list[Any]) -> None:
    assert "INTERNAL" not in harness.codes(reports), harness.reasons(reports)
    if harness.BACKEND == harness.NAMESPACE:
        assert outcome(reports) == expected, harness.reasons(reports)


def chunks(case: Case) -> tuple[int, ...]:
    """A refusal does not depend on the size of chunks."""
    return (SMALL, LARGE) if case.outcome.startswith("streamed") else (SMALL,)


def parameters(raises: bool) -> list[Any]:
    return [
        pytest.param(case, id=name, marks=pytest.mark.xfail(strict=True, reason=case.known) if case.known else ())
        for name, case in CASES.items()
        if case.raises == raises
    ]


@pytest.mark.parametrize("case", parameters(raises=False))
def test_case(case: Case) -> None:
    args = case.make()
    function = observed(case.function)
    eager, truth = harness.run(function, args), harness.run(function, args, wide=True)
    for size in chunks(case):
        torch._dynamo.reset()
        compiled = observed(harness.compiled(case.function, size, dynamic=case.dynamic))
        with harness.recording(facts(case, args)) as seen:
            ours = harness.run(compiled, args)
        found = harness.problems(ours, eager, truth, harness.floor(args))
        assert not found, f"chunks of {size} bytes: " + "\n".join(found)
        assert_outcome(case.outcome, seen.reports)
        assert not seen.leftovers, "vocabulary-sized tensors left:\n" + "\n".join(seen.leftovers)


@pytest.mark.parametrize("case", parameters(raises=True))
def test_case_that_eager_rejects(case: Case) -> None:
    args = case.make()
    with pytest.raises(FAULTS):
        harness.run(case.function, args)
    for size in chunks(case):
        torch._dynamo.reset()
        compiled = harness.compiled(case.function, size)
        expected = contextlib.nullcontext() if case.silent else pytest.raises(FAULTS)
        with harness.collecting() as reports, expected as raised:
            harness.run(compiled, args)
        if raised is not None:
            assert not isinstance(raised.value, torch._dynamo.exc.BackendCompilerFailed), raised.value
        assert_outcome(case.outcome, reports)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.silent], ids=lambda case: case.name)
def test_silent_case_is_silent_in_stock_compilation_too(case: Case) -> None:
    harness.run(torch.compile(case.function, backend="aot_eager_decomp_partition"), case.make())


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence(name: str, dynamic: bool | None) -> None:
    sequence = SEQUENCES[name]
    compiled = harness.compiled(sequence.function, SMALL, dynamic=dynamic)
    with torch._dynamo.config.patch(recompile_limit=64), harness.collecting() as reports:
        for number, make in enumerate(sequence.makes):
            args = make()
            eager, truth = harness.run(sequence.function, args), harness.run(sequence.function, args, wide=True)
            found = harness.problems(harness.run(compiled, args), eager, truth, harness.floor(args))
            assert not found, f"call {number}: " + "\n".join(found)
    assert_outcome(sequence.automatic or sequence.outcome if dynamic is None else sequence.outcome, reports)


# ---------------------------------------------------------------- a model, its options and its report


class Model(torch.nn.Module):
    """A tied head with a bias, a frozen layer, buffers that follow the loss, and a mixed bag of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = torch.nn.Embedding(41, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 41)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=20 + index, scale=0.4))
        self.head.weight = self.embed.weight
        self.layer.requires_grad_(False)
        self.register_buffer("running", torch.zeros(()))
        self.register_buffer("histogram", torch.zeros(41))

    def forward(self, y: torch.Tensor) -> dict[str, Any]:
        z = self.head(torch.tanh(self.layer(self.embed(y))))
        loss = F.cross_entropy(z[:-1], y[1:])
        self.running.mul_(0.9).add_(0.1 * loss.detach())
        self.histogram += z.detach().softmax(-1).sum(0)
        return {"loss": loss, "none": None, "number": 3.0, "hit": (z.argmax(-1) == y).float(), "n": y.shape[0]}


def test_model_with_buffers_over_three_batches() -> None:
    ours, eager = Model(), Model()
    compiled = harness.compiled(ours, SMALL, dynamic=None)
    with harness.collecting() as reports:
        for step in range(3):
            y = ids(13 + step, seed=step)
            got, expected = compiled(y), eager(y)
            got["loss"].backward()
            expected["loss"].backward()
            torch.testing.assert_close(got, expected)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert_outcome("streamed", reports)


def two_outputs(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = h @ w.t()
    return log_prob(z, y), entropy(z)


def test_outputs_differentiated_one_by_one() -> None:
    gradients = []
    for function in (two_outputs, harness.compiled(two_outputs, SMALL)):
        h, w, y = head()()
        outputs = function(h, w, y)
        gradients.append(
            [torch.autograd.grad(outputs[at].sum() * (at + 1), (h, w), retain_graph=True) for at in (0, 1, 0)]
        )
    torch.testing.assert_close(gradients[1], gradients[0])


# Each leaves its logits in the graph.
LEFT_WHOLE = (
    "rows_flipped",
    "rows_tiled_three_times",
    "rows_and_vocabulary_flipped",
    "temperature_of_2by1by1by41_that_learns",
    "columns_by_index_with_a_duplicate",
    "one_element_written_through_a_flat_view",
    "rows_sorted",
    "head_of_its_own_for_every_sequence",
    "head_cut_into_shards_of_the_vocabulary",
)


@pytest.mark.skipif(harness.BACKEND != harness.NAMESPACE, reason="an option of ours")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason="no product here is taken for a head"))
        if CASES[name].outcome == "NO_HEAD"
        else name
        for name in LEFT_WHOLE
    ],
)
def test_require_objects_to_logits_that_stay(name: str) -> None:
    case = CASES[name]
    with pytest.raises(Exception, match=r"grpo\.require is set"):
        harness.compiled(case.function, SMALL, require=True)(*case.make())


def two_heads(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return two_outputs(h, w, y)[0], (h.flip(0) @ w[:30].t()).logsumexp(-1)


@pytest.mark.skipif(harness.BACKEND != harness.NAMESPACE, reason="options of ours")
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("max_rewrites", 1, "streamed DISABLED"),
        ("max_rewrites", 0, "DISABLED"),
        ("disable", ["engine"], "DISABLED"),
        ("disable", "selective_logprob,logprob_entropy", "streamed"),
        ("accumulate", "param", "streamed"),
    ],
)
def test_options_change_what_runs_and_not_what_comes_out(option: str, value: Any, expected: str) -> None:
    args = head(dtype=torch.bfloat16)()
    eager, truth = harness.run(two_heads, args), harness.run(two_heads, args, wide=True)
    with harness.collecting() as reports:
        ours = harness.run(harness.compiled(two_heads, SMALL, **{option: value}), args)
    found = harness.problems(ours, eager, truth, 4 * harness.floor(args))
    assert not found, "\n".join(found)
    assert_outcome(expected, reports)
