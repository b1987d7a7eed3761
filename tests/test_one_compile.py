"""One compilation for every segment count, token count and factor; and never a number of an earlier call."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

from inductor_grpo import backend, config, generalise
from inductor_grpo._compat import retrace
from tests import harness

ROOT = Path(__file__).resolve().parent.parent
EAGER = {"grpo.codegen": "eager", "grpo.min_logits_bytes": 0}
HIDDEN, VOCABULARY = 8, 37

SEGMENTS = (0, 1, 2, 3, 5, 17, 64, 1000, 10000)
TOKENS = (0, 1, 2, 17, 64, 4096, 9000)


def compiled(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    options = {**EAGER, **keywords.pop("options", {})}
    return torch.compile(function, backend="inductor_grpo", options=options, **keywords)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def assert_as_eager(function: Callable[..., Any], call: Callable[..., Any], args: Sequence[Any], note: Any) -> None:
    eager, truth = harness.run(function, args), harness.run(function, args, wide=True)
    ours = harness.run(call, args)
    found = harness.problems(ours, eager, truth, harness.floor(args))
    assert not found, f"{note}: " + "\n".join(found)


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    """Dynamo is as it was before."""
    trace_frame, sources = convert_frame.trace_frame, torch.compiler.config.unbacked_sources
    table = dict(torch._decomp.decomposition_table)
    yield
    assert convert_frame.trace_frame is trace_frame and torch.compiler.config.unbacked_sources == sources
    assert torch._decomp.decomposition_table == table


# The seam ---------------------------------------------------------------------------------------------------


def seam(
    logp: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old: Tensor,
    ids: Tensor,
    num_segments: int,
    lengths: Tensor,
    divisor: float,
    scale: float = 1.0,
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """A loss and the mean of the new log-probabilities per segment."""
    log_ratio = (logp - old).reshape(-1)
    weights = mask.reshape(-1).to(log_ratio.dtype) / lengths.clamp(min=1)
    mean_ratio = log_ratio.new_zeros(num_segments).index_add_(0, ids, log_ratio * weights)
    mean_advantage = log_ratio.new_zeros(num_segments).index_add_(0, ids, advantages * weights)
    ratio, advantage = mean_ratio.exp()[ids], mean_advantage.detach()[ids]
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage) * mask.reshape(-1)
    return loss.sum() / divisor * scale, logp.new_zeros(num_segments).index_add_(0, ids, logp * weights)


def packed(tokens: int, segments: int, divisor: float = 3.0, scale: float = 1.0) -> list[Any]:
    generator = torch.Generator().manual_seed(tokens * 31 + segments)
    logp, old, advantages = (torch.randn(tokens, generator=generator) * 0.1 - 1 for _ in range(3))
    mask = torch.rand(tokens, generator=generator) > 0.3
    ids = torch.randint(0, max(segments, 1), (tokens,), generator=generator).sort().values
    lengths = torch.zeros(max(segments, 1)).index_add_(0, ids, mask.float())[ids]
    return [logp.requires_grad_(), mask, advantages, old, ids, segments, lengths, divisor, scale]


GRID = [(n, s) for s in SEGMENTS for n in TOKENS if s or not n]
STEPS = [(64, 5), (128, 7), (17, 1), (1, 2), (1, 1), (2, 9), (0, 0), (64, 3), (3, 1000)]


def test_the_whole_grid_is_one_compilation() -> None:
    call = compiled(seam)
    for step, (tokens, segments) in enumerate(GRID):
        args = packed(tokens, segments, 1.0 + step / 3, 0.5 + step / 7)
        assert_as_eager(seam, call, args, (tokens, segments))
    assert len(GRID) > 50 and graphs() == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [(1, 1), (0, 0), (1, 2), (17, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("keywords", [{}, {"fullgraph": True}, {"dynamic": True}], ids=str)
def test_any_call_may_be_the_first(first: tuple[int, int], keywords: dict[str, Any]) -> None:
    call = compiled(seam, **keywords)
    for step, (tokens, segments) in enumerate([first, *STEPS]):
        assert_as_eager(seam, call, packed(tokens, segments, 1.0 + step), (tokens, segments))
    assert graphs() == 1


def test_inference_and_training_are_a_graph_each() -> None:
    call = compiled(seam)
    for step, (tokens, segments) in enumerate(STEPS):
        args = packed(tokens, segments, 1.0 + step)
        with torch.no_grad():
            assert all(map(torch.allclose, call(*args), seam(*args)))
        assert graphs() == (1 if step == 0 else 2)
        assert_as_eager(seam, call, args, (tokens, segments))
    assert graphs() == 2


def by_offsets(logp: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, offsets: Tensor, *rest: Any) -> Any:
    ids = torch.bucketize(torch.arange(logp.numel()), offsets[1:], right=True)
    return seam(logp, mask, advantages, old, ids, offsets.numel() - 1, *rest)


def by_largest(logp: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, ids: Tensor, *rest: Any) -> Any:
    return seam(logp, mask, advantages, old, ids, int(ids.max()) + 1, *rest)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_count_of_cu_seqlens(fullgraph: bool) -> None:
    call = compiled(by_offsets, fullgraph=fullgraph)
    for step, (tokens, segments) in enumerate(STEPS):
        logp, mask, advantages, old, ids, _, lengths, *_ = packed(tokens, segments)
        counts = torch.bincount(ids, minlength=segments)[:segments]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        args = [logp, mask, advantages, old, offsets, lengths, 1.0 + step]
        assert_as_eager(by_offsets, call, args, (tokens, segments))
    assert graphs() == 1


@pytest.mark.parametrize("captured", [True, False])
def test_the_count_of_the_largest_id(captured: bool) -> None:
    call = compiled(by_largest, fullgraph=captured)
    with torch._dynamo.config.patch(capture_scalar_outputs=captured):
        for step, (tokens, segments) in enumerate([case for case in STEPS if case[0]]):
            logp, mask, advantages, old, ids, _, lengths, *_ = packed(tokens, segments)
            assert_as_eager(by_largest, call, [logp, mask, advantages, old, ids, lengths, 1.0 + step], segments)
    before_the_break = 0 if captured else 3  # there is no loss up to int(): 64 tokens, any number, and 1, as in stock
    assert graphs() == 1 + before_the_break


def test_an_int_divisor() -> None:
    call = compiled(seam)
    for step, (tokens, segments) in enumerate(STEPS):
        assert_as_eager(seam, call, packed(tokens, segments, 1 + step), (tokens, segments))
    assert graphs() == 1


# Heads and log-probabilities --------------------------------------------------------------------------------


def head_seam(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> Any:
    logits = F.linear(hidden, weight).float()
    return seam(logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).reshape(-1), *rest)


def head_logsumexp(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> Any:
    logits = (hidden @ weight.t()) / 1.3
    return seam((logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)).reshape(-1), *rest)


def head_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> Any:
    logits = torch.matmul(hidden, weight.transpose(0, 1)).flatten(0, -2)
    return seam(-F.cross_entropy(logits, labels.flatten(), reduction="none"), *rest)


def with_head(tokens: int, segments: int, divisor: float, batched: bool) -> list[Any]:
    _, *rest = packed(tokens, segments, divisor)
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) / 3
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    if batched:
        hidden, labels = hidden[None].clone(), labels[None].clone()
    return [hidden.requires_grad_(), weight.requires_grad_(), labels, *rest]


# Among them as many tokens as features and as words, where a size does not tell which dimension is which.
WITH_HEAD = [(64, 5), (17, 1), (1, 1), (2, 9), (HIDDEN, 3), (VOCABULARY, VOCABULARY), (1, HIDDEN), (300, 1000)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("batched", [False, True], ids=["[N,H]", "[B,T,H]"])
@pytest.mark.parametrize("loss", [head_seam, head_logsumexp, head_cross_entropy])
@pytest.mark.parametrize("first", [0, 2, 4, 5])
def test_head_and_seam(loss: Callable[..., Any], batched: bool, first: int) -> None:
    call = compiled(loss, options={"grpo.chunk_bytes": 5 * VOCABULARY * 4})
    cases = [*WITH_HEAD[first:], *WITH_HEAD[:first], *([] if batched else [(0, 0)])]
    with harness.collecting() as reports:
        for step, (tokens, segments) in enumerate(cases):
            assert_as_eager(loss, call, with_head(tokens, segments, 1.0 + step, batched), (tokens, segments))
    assert graphs() == 1 and len(reports) == 1
    assert reports[0].rewrites, harness.reasons(reports)


@pytest.mark.parametrize("as_parameter", [False, True])
def test_features_and_words_stay_numbers(as_parameter: bool) -> None:
    """Of hidden states and of a weight, whether it is a parameter or not; so do buffers of a module."""
    shapes: list[tuple[Any, ...]] = []

    def see(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        frame = generalise.before(gm, {})
        assert frame is not None
        for node in gm.graph.find_nodes(op="placeholder"):
            shapes.append(tuple(getattr(node.meta["example_value"], "shape", ())))
        return gm.forward

    args = with_head(64, 5, 2.0, True)
    if as_parameter:
        args[1] = torch.nn.Parameter(args[1].detach())
    torch.compile(head_seam, backend=see)(*args)
    (hidden,) = [shape for shape in shapes if len(shape) == 3]
    assert hidden[2] == HIDDEN and isinstance(hidden[2], int) and isinstance(hidden[1], torch.SymInt)
    assert (VOCABULARY, HIDDEN) in [shape for shape in shapes if all(isinstance(size, int) for size in shape)]


def by_log_softmax(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.float() / temperature, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def by_logsumexp(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() / temperature
    return scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, -1)


def by_cross_entropy(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    scaled = (logits / temperature).flatten(0, 1)
    return -F.cross_entropy(scaled, labels.flatten(), reduction="none").view_as(labels)


def by_hand(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    scaled = logits / temperature
    shifted = scaled - scaled.amax(-1, keepdim=True).detach()
    return shifted.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - shifted.exp().sum(-1).log()


SHAPES = [(2, 8), (4, 16), (1, 8), (2, 1), (1, 1), (8, 100), (1, 1024), (3, 7)]


def of_logits(batch: int, time: int, temperature: float) -> list[Any]:
    generator = torch.Generator().manual_seed(batch + time)
    logits = torch.randn(batch, time, VOCABULARY, generator=generator).requires_grad_()
    return [logits, torch.randint(VOCABULARY, (batch, time), generator=generator), temperature]


@pytest.mark.sample(3)
@pytest.mark.parametrize("keywords", [{}, {"fullgraph": True}, {"dynamic": True}], ids=str)
@pytest.mark.parametrize("loss", [by_log_softmax, by_logsumexp, by_cross_entropy, by_hand])
@pytest.mark.parametrize("first", [0, 4])
def test_log_probabilities(loss: Callable[..., Any], keywords: dict[str, Any], first: int) -> None:
    call = compiled(loss, **keywords)
    for step, (batch, time) in enumerate([*SHAPES[first:], *SHAPES[:first]]):
        assert_as_eager(loss, call, of_logits(batch, time, 0.7 + step / 5), (batch, time))
    assert graphs() == 1


def test_slices_of_larger_tensors() -> None:
    call = compiled(by_log_softmax)
    for step, (batch, time) in enumerate(SHAPES):
        logits, labels, temperature = of_logits(batch, time + 1, 1.0 + step)
        args = [logits.detach()[:, :-1], labels[:, 1:], temperature]
        assert torch.allclose(call(*args), by_log_softmax(*args), atol=1e-5)
    assert graphs() == 1


# What stays as in stock -------------------------------------------------------------------------------------


def test_dynamic_false_is_one_graph_a_size() -> None:
    call = compiled(seam, dynamic=False)
    for tokens, segments in STEPS[:7]:
        assert_as_eager(seam, call, packed(tokens, segments), (tokens, segments))
    assert graphs() == 7


def stock_graphs(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> int:
    torch._dynamo.reset()
    before = graphs()
    call = torch.compile(function, backend="aot_eager")
    for args in cases:
        harness.run(call, args)
    torch._dynamo.reset()
    return graphs() - before


@pytest.mark.parametrize("how", ["setting", "environment", "private"])
def test_without_it_the_counts_are_those_of_stock(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [packed(tokens, segments, 1.0 + segments) for tokens, segments in STEPS]
    stock = stock_graphs(seam, cases)
    if how == "environment":
        monkeypatch.setenv("INDUCTOR_GRPO_GENERALISE", "0")
    if how == "private":
        monkeypatch.setattr(retrace, "missing", lambda: "something of torch's own")
    counters.clear()
    call = compiled(seam, options={"grpo.generalise": False} if how == "setting" else {})
    for args in cases:
        assert_as_eager(seam, call, args, args[5])
    assert graphs() == stock > 1


@pytest.mark.parametrize("name", ["inputs", "settle", "float_symbols", "_find"])
def test_a_surprise_in_what_is_private_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(*_: object) -> None:
        raise AttributeError("torch has changed")

    owner = generalise.size_arguments if name == "_find" else generalise.Frame
    monkeypatch.setattr(owner, name, surprise)
    call = compiled(seam)
    for tokens, segments in STEPS:
        assert_as_eager(seam, call, packed(tokens, segments), (tokens, segments))


def with_branch(logp: Tensor, *args: Any) -> Any:
    if args[4] == 0:
        return logp.sum() * 0.0, logp.new_zeros(0)
    return seam(logp, *args)


def in_a_loop(logp: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, ids: Tensor, count: int, *_: Any) -> Any:
    sums = logp.new_zeros(count).index_add_(0, ids, logp)
    return sum((sums[i].exp() for i in range(count)), logp.new_zeros(())), sums


@pytest.mark.sample(2)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("loss", [with_branch, in_a_loop])
def test_python_that_needs_the_count_compiles_as_in_stock(loss: Callable[..., Any], fullgraph: bool) -> None:
    steps = [case for case in STEPS if case[1] < 10]
    cases = [packed(tokens, segments, 1.0 + segments) for tokens, segments in steps]
    stock = stock_graphs(loss, cases)
    counters.clear()
    call = compiled(loss, fullgraph=fullgraph)
    for args in cases:
        assert_as_eager(loss, call, args, args[5])
    assert 1 < graphs() <= stock


def test_a_frame_without_a_loss_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    original = convert_frame.trace_frame
    monkeypatch.setattr(
        convert_frame,
        "trace_frame",
        functools.wraps(original)(lambda *a, **k: (traces.append(1), original(*a, **k))[1]),
    )
    call = compiled(lambda x, w, scale: (x @ w).relu().sum() * scale)
    call(torch.randn(5, 3), torch.randn(3, 4), 2.0)
    assert len(traces) == 1
    compiled(seam)(*packed(64, 5))
    assert len(traces) == 3


def test_marks_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    args = of_logits(3, 5, 1.5)
    args[0] = args[0].detach()
    for tensor in args[:2]:
        torch._dynamo.mark_static(tensor, 0)
    call = compiled(by_log_softmax)
    call(*args)
    assert args[0]._dynamo_static_indices == {0} and not hasattr(args[0], "_dynamo_unbacked_indices")
    longer = of_logits(4, 5, 1.5)
    call(longer[0].detach(), *longer[1:])
    assert graphs() == 2


def test_a_size_of_one_is_broadcast_before_or_later() -> None:
    def loss(logits: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
        return (by_log_softmax(logits, labels, 1.0) * advantages).sum()

    for order in ([5, 1, 7, 1], [1, 5, 1, 7]):
        torch._dynamo.reset()
        call = compiled(loss)
        for time in order:
            args = [*of_logits(2, 5 if time == 1 else time, 1.0)[:2], torch.linspace(-1, 1, time)]
            assert_as_eager(loss, call, args, time)
    torch._dynamo.reset()
    counters.clear()
    call = compiled(loss)
    for batch, time in [(2, 8), (4, 16), (3, 5), (1, 9)]:  # an advantage for each sequence
        assert_as_eager(loss, call, [*of_logits(batch, time, 1.0)[:2], torch.randn(batch, 1)], (batch, time))
    assert graphs() == 1


def test_wrong_sizes_raise_what_eager_raises() -> None:
    call = compiled(seam)
    call(*packed(64, 5))
    args = packed(64, 5)
    args[2] = torch.randn(63)
    with pytest.raises(RuntimeError) as eager:
        seam(*args)
    with pytest.raises(RuntimeError) as ours:
        call(*args)
    assert "64" in str(eager.value) and "64" in str(ours.value) and "63" in str(ours.value)


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 6])
def test_each_size_is_checked_though_one_is_passed(place: int) -> None:
    call = compiled(seam)
    call(*packed(64, 5))
    args = packed(64, 5)
    args[place] = args[place].detach()[:63]
    with pytest.raises(RuntimeError):
        seam(*args)
    with pytest.raises(RuntimeError, match="63"):
        call(*args)
    assert_as_eager(seam, call, packed(63, 4), 63)


def test_a_step_reads_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one length have it once: reading it is most of what a symbol costs at a call."""
    read: list[int] = []
    original = torch._dynamo.utils.call_size

    def call_size(x: Any, i: int) -> int:
        read.append(i)
        return original(x, i)

    monkeypatch.setattr(torch._dynamo.utils, "call_size", call_size)
    call = compiled(seam)
    call(*packed(64, 5))
    read.clear()
    assert_as_eager(seam, call, packed(65, 4), "the next length")
    assert len(read) <= 1 and graphs() == 1


def sequences_of_flat_tokens(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    logp = F.log_softmax(hidden @ weight.t(), -1).gather(-1, labels[:, None]).squeeze(-1)
    rows, mask = (logp - old).view(4, -1), mask.view(4, -1)
    ratio = torch.exp((rows * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True))
    return -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum()


def flat_tokens(n: int, labelled: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    labelled = n if labelled is None else labelled
    hidden, weight = torch.randn(n, HIDDEN, generator=generator), torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCABULARY, (labelled,), generator=generator)
    old = torch.randn(labelled, generator=generator) * 0.1 - 3.6
    return [hidden.requires_grad_(), weight.requires_grad_(), labels, old, torch.ones(labelled)]


def test_sequences_of_flat_tokens_are_one_pass_at_every_length() -> None:
    """A length divided by the number of sequences: what equals what is known from assertions alone."""
    call = compiled(sequences_of_flat_tokens)
    with backend.collected() as reports:
        for n in (32, 36, 4, 64, 8):
            assert_as_eager(sequences_of_flat_tokens, call, flat_tokens(n), n)
    assert graphs() == 1
    assert {r.schedule for report in reports for r in report.rewrites} == {"one-pass"}


def test_fewer_labels_than_rows_after_as_many() -> None:
    """gather may leave rows out; a loss whose first call has none left out is compiled as one that never has."""
    call = compiled(sequences_of_flat_tokens)
    for n, labelled in ((32, 32), (40, 40), (40, 36), (44, 8), (36, 36)):
        assert_as_eager(sequences_of_flat_tokens, call, flat_tokens(n, labelled), (n, labelled))
    assert graphs() == 2
    with pytest.raises(RuntimeError):
        call(*flat_tokens(32, 36))


def test_an_error_of_the_function_is_its_own() -> None:
    def wrong(logp: Tensor, ids: Tensor, count: int) -> Tensor:
        return (logp.new_zeros(count).index_add_(0, ids, logp) @ torch.ones(3, 3)).sum()

    with pytest.raises(RuntimeError):
        compiled(wrong)(torch.randn(7), torch.zeros(7, dtype=torch.long), 5)


def test_reports_of_abandoned_traces_do_not_show() -> None:
    with harness.collecting() as reports:
        compiled(with_branch)(*packed(64, 5))
    assert len(reports) == 1 and backend.last_report() is reports[0]


# Floats that decide something -------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_clip_bound_is_never_stale(dynamic: bool | None) -> None:
    """Stock gives the loss of the first bound for the later ones when its cache answers."""
    with inductor_config.patch(force_disable_caches=False), config.patch(codegen="inductor"):
        call = torch.compile(seam, backend="inductor_grpo", dynamic=dynamic)
        for bound in (0.01, 0.02, 0.03, 0.01):
            args = [*packed(64, 5), bound, 2 * bound]
            torch.testing.assert_close(call(*args)[0], seam(*args)[0])
            torch._dynamo.reset()


def test_a_clip_bound_costs_at_most_one_compilation_a_value() -> None:
    call = compiled(seam)
    for step, bound in enumerate((0.01, 0.01, 0.02, 0.03, 0.02, 0.01)):
        assert_as_eager(seam, call, [*packed(10 + step, 3 + step, 1.0 + step), bound, 0.4], bound)
    assert graphs() <= 3


PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from inductor_grpo import backend
from tests.test_one_compile import packed, seam

found = []
for low, divisor in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    args = [*packed(64, 5, divisor), low, 2 * low]
    loss, _ = torch.compile(seam, backend=backend.inductor_grpo, dynamic=json.loads(sys.argv[2]))(*args)
    found.append([loss.item(), seam(*args)[0].item()])
print(json.dumps([found, counters["aot_autograd"]["autograd_cache_hit"]]))
"""


@pytest.mark.parametrize("dynamic", ["null", "true"])
def test_processes_share_the_cache_and_no_bound(tmp_path: Path, dynamic: str) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    hits = []
    for steps in ([[0.01, 2.0]], [[0.01, 3.0]], [[0.05, 4.0], [0.01, 5.0], [0.06, 6.0]]):
        command = [sys.executable, "-c", PROGRAM, json.dumps(steps), dynamic]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        values, hit = json.loads(done.stdout.splitlines()[-1])
        assert all(abs(ours - eager) <= 1e-6 for ours, eager in values), values
        hits.append(hit)
    assert hits == [0, 1, 1]  # the divisor is no part of what is stored, the bound is


# With generated code ----------------------------------------------------------------------------------------


def test_generated_code() -> None:
    call = torch.compile(head_seam, backend="inductor_grpo", options={"grpo.min_logits_bytes": 0})
    for step, (tokens, segments) in enumerate([(64, 5), (1, 1), (17, 1), (0, 0), (2, 9), (5000, 1000)]):
        assert_as_eager(head_seam, call, with_head(tokens, segments, 1.0 + step, False), (tokens, segments))
    assert graphs() == 1
