"""What rewrites look like: canonical graphs before and after, rejection texts; their counts on every torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_grpo
from inductor_grpo import canonical, seam
from inductor_grpo.explain import fresh_copy
from inductor_grpo.pattern import all_patterns
from inductor_grpo.patterns import naive, segment_sums
from tests import harness
from tests.corpus.spellings import ids, normal
from tests.snapshots import Inline, assert_file, pinned
from tests.test_cures import PAIRS, arguments, explained, unbroken

N, H, V = 12, 8, 60


@dataclasses.dataclass(frozen=True)
class Shot:
    """A function to rewrite, how, and what is to come out of it: schedule, matmuls, pattern of each rewrite."""

    name: str
    function: Callable[..., Any]
    rewrites: tuple[tuple[str, int, str], ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grad: bool = True
    dynamic: bool = False
    dtype: torch.dtype = torch.float32
    packed: bool = False
    """The function takes log-probs of tokens and their segments, not hidden, weight and labels."""
    fused: bool = False
    """The call that sums computes the terms, too, as on CUDA."""


def clipped(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A clipped policy loss."""
    logp = naive.log_softmax_gather(hidden, weight, labels)
    ratio = torch.exp(logp - logp.detach())
    return -torch.min(ratio * 2.0, ratio.clamp(0.8, 1.2) * 2.0).mean()


def with_bias(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A head with a bias that learns nothing."""
    return F.cross_entropy(F.linear(hidden, weight, torch.ones(V)), labels)


def packed() -> tuple[Any, ...]:
    """New log-probs, mask, advantages, old log-probs, ids, number of segments, labels of a token's segment, divisor."""
    new, old, adv = (normal(N, seed=seed, scale=0.3) for seed in (1, 2, 3))
    segments = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    mask = torch.arange(N) % 5 > 0
    labels = torch.zeros(3).index_add_(0, segments, mask.float())[segments]
    return new.requires_grad_(), mask, adv, old, segments, 3, labels, 10.0


def per_sequence(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The clipped loss of sequences of four tokens, from the logits on."""
    logp = naive.log_softmax_gather(hidden, weight, labels)
    segments = torch.arange(N) // 4
    return segment_sums.mean_by_index_add(logp, logp.detach(), torch.ones(N), segments, N // 4)


ROWS_OF_TWO = {"disable": "tiles", "schedule": "two-pass"}
SHOTS = (
    Shot("selective_logprob", naive.log_softmax_gather, (("two-pass, vocabulary tiles", 4, "selective_logprob"),)),
    Shot(
        "logprob_entropy",
        naive.entropy_of_both,
        (("two-pass, vocabulary tiles", 4, "logprob_entropy+selective_logprob"),),
    ),
    Shot("engine_one_pass", clipped, (("one-pass", 3, "engine"),)),
    Shot("engine_two_pass", clipped, (("two-pass", 4, "engine"),), ROWS_OF_TWO),
    Shot("engine_forward", naive.gather_minus_logsumexp, (("forward", 1, "engine"),), {"disable": "tiles"}, grad=False),
    Shot("engine_bias_bf16", with_bias, (("two-pass", 4, "engine"),), ROWS_OF_TWO, dtype=torch.bfloat16),
    Shot("dynamic_rows", naive.log_softmax_gather, (("two-pass", 4, "engine"),), {"disable": "tiles"}, dynamic=True),
    Shot(
        "segment_sums",
        segment_sums.weighted_by_label_count,
        (("one call: 2 sums per segment", 0, "segment_sums"), ("one call: 1 sum per segment", 0, "segment_sums")),
        packed=True,
    ),
    Shot(
        "segment_sums_fused",
        segment_sums.weighted_by_label_count,
        (
            ("one kernel: 2 sums per segment, 1 total", 0, "segment_sums"),
            ("one kernel: 1 sum per segment, 1 total", 0, "segment_sums"),
        ),
        packed=True,
        fused=True,
    ),
)


@pytest.fixture
def shot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shot:
    found: Shot = request.param
    if found.fused:
        monkeypatch.setattr(seam, "FUSED_DEVICES", ("cpu", "cuda"))
    return found


every_shot = pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot.name, indirect=True)


def captured(shot: Shot) -> inductor_grpo.Capture:
    function, args = shot.function, packed() if shot.packed else _head(shot)
    if shot.dtype is not torch.float32 and function is with_bias:
        function = with_bias_of(shot.dtype)
    compiled = harness.compiled(fresh_copy(function), 5 * V * 4, dynamic=shot.dynamic, generalise=False, **shot.options)
    with inductor_grpo.capture() as found:
        compiled(*args)
    return found


def _head(shot: Shot) -> tuple[Tensor, Tensor, Tensor]:
    hidden = normal(N, H, seed=1, grad=shot.grad, dtype=shot.dtype)
    return hidden, normal(V, H, seed=2, grad=shot.grad, dtype=shot.dtype), ids(N, high=V)


def with_bias_of(dtype: torch.dtype) -> Callable[..., Tensor]:
    def with_bias(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, torch.ones(V, dtype=dtype)).float(), labels)

    return with_bias


@every_shot
def test_counts(shot: Shot) -> None:
    found = captured(shot)
    assert len(found.graphs) == 1
    assert not found.report.rejections
    assert tuple((r.schedule, r.matmuls, r.pattern) for r in found.report.rewrites) == shot.rewrites


@pinned
@every_shot
def test_before_and_after(shot: Shot) -> None:
    (graph,) = captured(shot).graphs
    parts = []
    for stage in ("joint", "rewritten"):
        found = graph.stage(stage)
        assert found is not None
        parts.append(f"---- {stage}\n{canonical.text(found, where=False)}")
    assert_file(shot.name, "\n".join(parts))


def test_every_pattern_has_a_snapshot() -> None:
    assert {*all_patterns(), seam.NAME} <= {shot.name for shot in SHOTS}


def test_stages_of_logits_and_seam() -> None:
    """Both in one graph: what the logits became is a stage of its own, with the sums as they were written."""
    found = captured(Shot("both", per_sequence, ()))
    (graph,) = found.graphs
    assert [s.name for s in graph.stages][:4] == ["joint", "normalised", "streamed", "rewritten"]
    assert [r.pattern for r in found.report.rewrites].count(seam.NAME) == len(found.report.rewrites) - 1
    texts = {s.name: canonical.text(s.graph) for s in graph.stages}
    for name, rows, sums in (("normalised", False, False), ("streamed", True, False), ("rewritten", True, True)):
        assert ("inductor_grpo.rows" in texts[name] or "inductor_grpo.tiles" in texts[name]) == rows, name
        assert ("inductor_grpo.segments" in texts[name]) == sums, name
        assert ("aten.index_add" in texts[name] or "aten.index_put" in texts[name]) != sums, name


@pinned
def test_one_line_for_each_rejection() -> None:
    lines = []
    for pair in PAIRS:
        for r in explained(pair.fault, pair.make()).rejections:
            place = r.location.code.split("  #")[0] if r.location else ""
            lines += [f"{pair.fault.__name__}: {r.code} by {r.op or '-'}", f"    {place}"]
            lines += [f"    why   {r.why}", f"    cure  {r.cure}", ""]
    for name, function, settings in OTHERS:
        torch._dynamo.reset()
        with inductor_grpo.config.patch(**settings):
            for r in inductor_grpo.explain(function, *arguments()()).rejections:
                lines += [f"{name}: {r.code} by {r.op or '-'}", f"    why   {r.why}", f"    cure  {r.cure}", ""]
    assert_file("rejections", "\n".join(lines).replace(_line_numbers(), ""))


OTHERS: tuple[tuple[str, Callable[..., Any], dict[str, Any]], ...] = (
    ("too small", unbroken, {}),
    ("one chunk is enough", lambda h, w, y: unbroken(h.detach(), w.detach(), y), {"min_logits_bytes": 1}),
    ("no head", lambda h, w, y: h.sin(), {"min_logits_bytes": 0}),
    (
        "a head for each sequence",
        lambda h, w, y: h.view(2, 12, 16).bmm(w[:96].view(2, 16, 48)),
        {"min_logits_bytes": 0},
    ),
    ("switched off", unbroken, {"min_logits_bytes": 0, "disable": "engine"}),
    ("enough of them", unbroken, {"min_logits_bytes": 0, "max_rewrites": 0}),
)


def _line_numbers() -> str:
    """The place of the graph break in test_cures, which moves when that file is edited."""
    from tests.test_cures import broken, marked

    return f":{marked(broken) + 1}"


# ---------------------------------------------------------------- the format itself


def small(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)[1:].to(torch.bfloat16)


def graph_of(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> torch.fx.Graph:
    with inductor_grpo.capture(codegen="eager") as found:
        torch.compile(fresh_copy(function), backend=harness.backend(), dynamic=dynamic)(*args)
    (graph,) = found.graphs
    joint = graph.stage("joint")
    assert joint is not None
    return joint


@pinned
def test_format() -> None:
    graph = graph_of(small, torch.randn(4, 3), torch.randn(3, 5))
    Inline().assertExpectedInline(
        canonical.text(graph, where=False),
        """\
%arg : f32[4, 3] = input
%arg_1 : f32[3, 5] = input
%mm : f32[4, 5] = aten.mm(%arg, %arg_1)
%relu : f32[4, 5] = aten.relu(%mm)
%slice : f32[3, 5] = aten.slice.Tensor(%relu, 0, 1, end)
%convert_element_type : bf16[3, 5] = prims.convert_element_type(%slice, bf16)
return (%convert_element_type,)
""",
    )


@pinned
def test_format_of_symbolic_sizes() -> None:
    graph = graph_of(small, torch.randn(4, 3), torch.randn(3, 5), dynamic=True)
    Inline().assertExpectedInline(
        canonical.text(graph, where=False),
        """\
%arg : int s0 = input
%arg_1 : int s1 = input
%arg_2 : f32[s0, s1] = input
%arg_3 : int s2 = input
%arg_4 : f32[s1, s2] = input
%mm : f32[s0, s2] = aten.mm(%arg_2, %arg_4)
%relu : f32[s0, s2] = aten.relu(%mm)
%slice : f32[s0 - 1, s2] = aten.slice.Tensor(%relu, 0, 1, end)
%convert_element_type : bf16[s0 - 1, s2] = prims.convert_element_type(%slice, bf16)
return (%convert_element_type,)
""",
    )


def test_text_does_not_depend_on_names_or_earlier_symbols() -> None:
    texts = []
    for rows in (4, 4):
        torch._dynamo.reset()
        graph_of(lambda x: x.sin(), torch.randn(rows), dynamic=True)
        texts.append(canonical.text(graph_of(small, torch.randn(rows, 3), torch.randn(3, 5), dynamic=True)))
    assert texts[0] == texts[1]
    renamed = graph_of(small, torch.randn(4, 3), torch.randn(3, 5), dynamic=True)
    for node in list(renamed.nodes):
        if node.op == "call_function":
            node.name = node.name + "_other"
    assert canonical.text(renamed) == texts[0]
    assert "test_snapshots.py" in texts[0] and "cpu" not in texts[0]
