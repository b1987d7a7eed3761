"""Over the corpora: what stays of vocabulary-sized tensors has a rejection, at the line that keeps it.

``tests/expected/left_alone.txt`` holds those lines, each checked by reading; ``EXPECTTEST_ACCEPT=1`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import inductor_grpo
from inductor_grpo.report import Location
from tests import harness, snapshots
from tests.corpus import faults, odd
from tests.test_faults import NOT_STREAMED, streamed_facts

ODD = [case for case in odd.CASES.values() if case.outcome != "streamed" and not case.raises]
FAULTS = [c for c in faults.CASES.values() if c.id in NOT_STREAMED and c.raises is None and not c.own_backward]
LINES = snapshots.FOLDER / "left_alone.txt"
SMALLER_THAN_HIDDEN = ("near_softmax_dim0", "near_transposed_logits", "size_vocab_1", "size_vocab_2")


def is_large(node: torch.fx.Node, facts: harness.Graphs) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and bool(node.users)
        and harness.is_leftover([harness.hint(size) for size in value.shape], facts)
    )


def lines_of_large_tensors(captured: inductor_grpo.Capture, facts: harness.Graphs) -> set[Location]:
    """The lines that make a vocabulary-sized tensor or read one."""
    found: set[Location | None] = set()
    for graph in captured.graphs:
        joint = graph.stage("joint")
        for node in joint.nodes if joint is not None else ():
            if is_large(node, facts):
                found |= {Location.of(n) for n in (node, *node.users)}
    return {location for location in found if location is not None}


def known_lines() -> dict[str, list[str]]:
    """By case: code and source line of each rejection."""
    found: dict[str, list[str]] = {}
    for line in LINES.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            found[next(reversed(found))].append(line.strip())
        else:
            found[line] = []
    return found


def described(rejections: list[inductor_grpo.Rejection]) -> list[str]:
    return [f"{r.code}: {r.location.code if r.location else '(no line)'}" for r in rejections]


def assert_explained(
    function: Any, args: Any, kwargs: Any, facts: harness.Graphs, dynamic: bool | None
) -> list[inductor_grpo.Rejection]:
    with harness.recording(facts), inductor_grpo.capture() as captured:
        harness.run(harness.compiled(function, 64, dynamic=dynamic), args, kwargs, backward=False)
    rejections = captured.report.rejections
    if not facts.leftovers:
        return rejections
    assert rejections, "\n".join(["stays, and nothing says so:", *facts.leftovers])
    lines = lines_of_large_tensors(captured, facts)
    for rejection in rejections:
        assert rejection.why and rejection.cure
        assert rejection.location in lines, f"{rejection}\nis at none of\n" + "\n".join(map(str, lines))
    return rejections


@pytest.fixture(scope="module", autouse=True)
def accepted() -> Iterator[dict[str, list[str]]]:
    """Writes the file of known lines after all cases have run, where that is asked for."""
    lines: dict[str, list[str]] = {}
    yield lines
    if snapshots.ACCEPT and len(lines) == len(ODD):
        text = "".join(f"{name}\n" + "".join(f"  {x}\n" for x in lines[name]) for name in sorted(lines))
        snapshots.assert_file(LINES.stem, text)


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_case(case: odd.Case, accepted: dict[str, list[str]]) -> None:
    args = case.make()
    facts = harness.Graphs(frozenset(), frozenset())
    if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dim() > 1:
        facts = harness.graph_facts(args)
    accepted[case.name] = described(assert_explained(case.function, args, None, facts, case.dynamic))
    if not snapshots.ACCEPT:
        assert accepted[case.name] == known_lines()[case.name]


DYNAMIC = [case for case in ODD if case.dynamic is False and "MIXES_ROWS" in str(known_lines().get(case.name))]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", DYNAMIC[::4], ids=lambda case: case.name)
def test_odd_case_of_symbolic_sizes(case: odd.Case) -> None:
    """The same line keeps it, whatever the code."""
    args = case.make()
    rejections = assert_explained(case.function, args, None, harness.graph_facts(args), True)
    lines = {x.split(": ", 1)[1] for x in described(rejections)}
    assert lines == {x.split(": ", 1)[1] for x in known_lines()[case.name]}


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.id)
def test_fault(case: faults.Case) -> None:
    function, args, kwargs, _ = case.build()
    facts = streamed_facts(case, args)
    if min(facts.vocabularies, default=0) > min(args[1].shape):  # logits narrower than hidden are smaller than it
        assert_explained(function, args, kwargs, facts, False)
    else:
        assert case.id in SMALLER_THAN_HIDDEN


def test_most_of_them_leave_something() -> None:
    """The tests above would pass if nothing ever stayed."""
    left = 0
    for case in ODD[:8]:
        args = case.make()
        facts = harness.graph_facts(args)
        with harness.recording(facts):
            harness.run(harness.compiled(case.function, 64), args, backward=False)
        left += bool(facts.leftovers)
    assert left >= 5


MANY, FEATURES, INNER = 80, 16, 24


def with_a_value_head(hidden, weight, labels, other):  # type: ignore[no-untyped-def]
    value = F.linear(hidden, other[:1]).squeeze(-1)
    return (log_prob(hidden, weight, labels) * value.detach() + value.square()).mean()


def with_a_square_layer(hidden, weight, labels, other):  # type: ignore[no-untyped-def]
    return log_prob(hidden + F.silu(F.linear(hidden, other)), weight, labels).mean()


def with_two_layers(hidden, weight, labels, other):  # type: ignore[no-untyped-def]
    inner = F.silu(F.linear(hidden, other.repeat(2, 1)[:INNER]))
    return log_prob(hidden + F.linear(inner, other.repeat(1, 2)[:, :INNER]), weight, labels).mean()


def log_prob(hidden, weight, labels):  # type: ignore[no-untyped-def]
    return F.linear(hidden, weight).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("vocabulary", [31, 127])
@pytest.mark.parametrize("function", [with_a_value_head, with_a_square_layer, with_two_layers])
def test_tokens_are_no_vocabulary(function: Any, vocabulary: int) -> None:
    """More tokens than features, and than half of the vocabulary: the head is rewritten, a layer is not."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, other = (
        torch.randn(n, FEATURES, generator=g).requires_grad_() for n in (MANY, vocabulary, FEATURES)
    )
    labels = torch.randint(0, vocabulary, (MANY,), generator=g)
    facts = harness.check(function, [hidden, weight, labels, other])
    assert facts.regions == 1 and facts.matmuls == 3
    (rewrite,) = [r for report in facts.reports for r in report.rewrites]
    assert "in log_prob" in str(rewrite.location)
    assert not harness.codes(facts.reports)
