"""Sums per segment: rewritten in every spelling, right in value and gradient, whatever the ids look like."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from inductor_grpo import seam
from tests import harness
from tests.corpus import seams
from tests.corpus.faults import CASES
from tests.corpus.variants import VARIANTS

# id -> (calls of the operator, sums per segment in them); forward and backward of one graph.
CORPUS = {
    "GSPO06": (2, 4),
    "GSPO09": (3, 4),
    "GSPO13": (1, 2),
    "GSPO16": (2, 3),
    "GSPO18": (2, 3),
    "GSPO22": (2, 6),  # one-hot: two of them count values that are not finite
    "GSPO19": (1, 1),  # segment_reduce keeps its own kernel; the broadcast back is one sum in the backward
}
FAULTS = {
    "gspo_basic": (1, 2),
    "gspo_end_to_end": (1, 2),
    "gspo_one_segment": (1, 2),
    "gspo_one_segment_read_back": (2, 3),
    "gspo_token_form": (1, 2),
    "gspo_empty_segment": (1, 2),
    "gspo_all_masked": (1, 2),
    "gspo_masked_tokens_inert": (1, 2),
    "gspo_exp_overflow": (1, 2),
    "gspo_exp_clamped": (1, 2),
    "gspo_crosses_chunks": (1, 2),
    "gspo_many_segments": (1, 2),
    "gspo_dump_row": (1, 2),
    "gspo_int32_ids": (1, 2),
    "gspo_bf16_counts": (1, 2),
    "gspo_token_advantages": (1, 3),
    "gspo_on_policy": (1, 2),
    "gspo_n_from_tensor": (1, 2),
    "gspo_zero_buffer_expanded": (1, 1),
    "gspo_index_add_alpha": (1, 1),
    "gspo_form_scatter_add": (1, 1),  # bincount breaks the graph: its own kernel
    "gspo_form_scatter_reduce": (1, 3),
    "gspo_form_one_hot": (1, 3),  # one counts values that are not finite
}


@dataclasses.dataclass
class Mode:
    """Whether the operator computes the terms too, as on CUDA, or Inductor does, as on a CPU; and the shapes."""

    fused: bool
    dynamic: bool | None


MODES = {
    "sums-static": Mode(False, False),
    "sums-dynamic": Mode(False, True),
    "fused-static": Mode(True, False),
    "fused-automatic": Mode(True, None),
}


def in_modes(*names: str) -> Any:
    return pytest.mark.parametrize("mode", [MODES[name] for name in names], ids=names, indirect=True)


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mode:
    found: Mode = request.param
    if found.fused:
        monkeypatch.setattr(seam, "FUSED_DEVICES", ("cpu", "cuda"))
    return found


def check(
    function: Any,
    args: Any,
    expected: tuple[int, int] | None,
    kwargs: Any = None,
    dynamic: bool | None = False,
    **more: Any,
) -> harness.Graphs:
    """Right by the rule of the harness; ``expected`` calls and sums."""
    facts = harness.Graphs(frozenset(), frozenset())
    eager = harness.run(function, args, kwargs)
    truth = harness.run(function, args, kwargs, wide=True)
    with harness.recording(facts):
        ours = harness.run(harness.compiled(function, 5 * 37 * 4, dynamic=dynamic, **more), args, kwargs)
    found = harness.problems(ours, eager, truth, harness.floor((args, kwargs)))
    assert not found, "\n".join(found)
    assert "INTERNAL" not in harness.codes(facts.reports), harness.reasons(facts.reports)
    if expected is not None:
        assert (facts.seam_calls, facts.segment_sums) == expected, harness.reasons(facts.reports)
    return facts


@pytest.mark.sample(2)
@in_modes("sums-dynamic", "fused-automatic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("id", CORPUS)
def test_corpus(id: str, dtype: torch.dtype, mode: Mode) -> None:
    variant = VARIANTS[id]
    calls, sums = CORPUS[id]
    if mode.fused:
        calls = seams.CALLS_WHEN_FUSED.get(id, calls)
    facts = check(variant.function, variant.factory("cpu", dtype, True), (calls, sums), dynamic=mode.dynamic)
    assert facts.regions >= 1, "the head is streamed as well"


@pytest.mark.sample(2)
@in_modes("sums-static", "fused-automatic")
@pytest.mark.parametrize("id", FAULTS)
def test_fault(id: str, mode: Mode) -> None:
    function, args, kwargs, _ = CASES[id].build()
    expected = (
        None if mode.dynamic is not False and id == "gspo_form_one_hot" else FAULTS[id]
    )  # breaks there, as in BREAKS_WHEN_DYNAMIC
    check(function, args, expected, kwargs, dynamic=mode.dynamic)


def test_every_case_with_a_sum_is_in_the_tables() -> None:
    """What is not: padded layouts, which need no sum per segment, and cases that must raise."""
    listed = CORPUS.keys() | FAULTS.keys() | seams.WITHOUT_SUMS.keys()
    packed = {id for id in VARIANTS if id.startswith("GSPO")}
    packed |= {id for id, case in CASES.items() if id.startswith("gspo") and case.raises is None}
    assert packed <= listed, packed - listed


@pytest.mark.sample(3, only="dynamic")
@in_modes("sums-static", "sums-dynamic", "fused-static", "fused-automatic")
@pytest.mark.parametrize("name", seams.SPELLINGS)
def test_spelling(name: str, mode: Mode) -> None:
    function, args, expected = seams.SPELLINGS[name]()
    dynamic = mode.dynamic is not False
    if mode.fused and not (dynamic and name == "fast_llm_one_token"):
        expected = seams.CALLS_WHEN_FUSED.get(name, expected[0]), expected[1]
    known = not (dynamic and name in seams.BREAKS_WHEN_DYNAMIC)
    check(function, args, expected if known else None, dynamic=mode.dynamic)


@pytest.mark.parametrize("name", seams.LEFT)
def test_left_alone(name: str) -> None:
    """What is no sum per segment stays as it is, and right."""
    function, args = seams.LEFT[name]()
    check(function, args, (0, 0))


@in_modes("sums-static", "fused-static")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_segmentations(data: st.DataObject, mode: Mode) -> None:
    count = data.draw(st.integers(0, 12), label="segments")
    tokens = data.draw(st.integers(0, 80), label="tokens") if count else 0
    ids = data.draw(st.lists(st.integers(0, max(0, count - 1)), min_size=tokens, max_size=tokens), label="ids")
    if data.draw(st.booleans(), label="sorted"):
        ids.sort()
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]), label="dtype")
    seed = data.draw(st.integers(0, 1 << 16), label="seed")
    args = seams.fast_llm_args(torch.tensor(ids, dtype=dtype), count, seed=seed)
    torch._dynamo.reset()
    check(seams.fast_llm, args, None, dynamic=data.draw(st.booleans(), label="dynamic"))


@in_modes("sums-static", "fused-static")
@pytest.mark.parametrize("bad", [-1, 3, 1 << 40])
@pytest.mark.parametrize("name", ["index_add", "scatter_add"])
def test_bad_ids_raise_as_in_eager(name: str, bad: int, mode: Mode) -> None:
    function = {"index_add": seams.index_add, "scatter_add": seams.scatter_add}[name]
    args = list(seams.packed_args())
    args[3] = args[3].clone()
    args[3][2] = bad
    with pytest.raises((IndexError, RuntimeError)):
        function(*args)
    with pytest.raises((IndexError, RuntimeError)) as raised:
        harness.compiled(function)(*args)
    assert not isinstance(raised.value, torch._dynamo.exc.BackendCompilerFailed)


@in_modes("sums-static", "fused-static")
def test_negative_ids_of_index_put_wrap(mode: Mode) -> None:
    args = list(seams.packed_args())
    args[3] = args[3] - args[4]  # all negative: the same segments, counted from the end
    check(seams.index_put, tuple(args), (1, 2))


@pytest.mark.parametrize("count", [1, 2])
def test_one_segment_compiles_on_a_cpu(count: int) -> None:
    """Through generated code, forward and backward; stock Inductor cannot generate a scatter into one element."""
    ids = torch.zeros(9, dtype=torch.int64)
    check(seams.fast_llm, seams.fast_llm_args(ids, count), (2, 3), codegen="inductor")


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
def test_generated_code_passes_the_dispatcher_by(cpp: bool) -> None:
    """Python code calls the function behind the operator; code in C++ has nothing but the operator."""
    args = seams.fast_llm_args(torch.tensor([0, 0, 1, 2, 2]), 3)
    call = torch.compile(seams.fast_llm, backend="inductor_grpo", options={"cpp_wrapper": cpp})
    with torch.no_grad():
        found, codes = run_and_get_code(call, *args)
        known = seams.fast_llm(*args)
    torch.testing.assert_close(found, known)
    assert "inductor_grpo.segments" in codes[0] or "inductor_grpo::segments" in codes[0]
    assert ("segments.default.inductor_grpo_function(" in codes[0]) == (not cpp)


@in_modes("sums-static", "fused-static")
def test_runs_are_bitwise_equal(mode: Mode) -> None:
    ids = torch.arange(4000) // 7
    args = seams.fast_llm_args(ids, int(ids[-1]) + 1)
    call = harness.compiled(seams.fast_llm)
    first, second = harness.run(call, args), harness.run(call, args)
    for (name, a), (_, b) in zip(first.values(), second.values(), strict=True):
        assert a is None or (b is not None and torch.equal(a, b)), name


@in_modes("sums-static", "fused-static")
def test_half_precision_sums_in_fp32(mode: Mode) -> None:
    """Eager's own bf16 counter stops at 256."""
    ids = torch.zeros(1000, dtype=torch.int64)
    ones = torch.ones(1000, dtype=torch.bfloat16)
    call = harness.compiled(lambda x, i: x.new_zeros(1).index_add_(0, i, x) * 1)
    assert call(ones, ids).item() == 1000


def test_disabled_by_name() -> None:
    facts = check(seams.index_add, seams.packed_args(), (0, 0), disable=["segment_sums"])
    assert harness.codes(facts.reports) == ["DISABLED"]


def test_counts_as_a_rewrite_for_max_rewrites() -> None:
    check(seams.index_add, seams.packed_args(), (0, 0), max_rewrites=0)


def test_report_names_the_line() -> None:
    facts = check(seams.index_add, seams.packed_args(), (1, 2))
    (rewrite,) = [r for report in facts.reports for r in report.rewrites]
    assert rewrite.pattern == "segment_sums"
    assert rewrite.location is not None and "index_add_" in rewrite.location.code
    assert "2 sums" in str(rewrite) and "matmul" not in str(rewrite)


def test_a_cuda_graph_does_not_keep_a_number_of_the_host() -> None:
    """A divisor on another device is no input of the kernel where graphs are captured: Inductor looks after it."""
    from inductor_grpo.graph import value
    from inductor_grpo.seam import terms

    graph = torch.fx.Graph()
    ids, number = graph.placeholder("ids"), graph.placeholder("number")
    ids.meta["val"] = torch.empty(4, dtype=torch.int64, device="meta")
    number.meta["val"] = torch.tensor(2.0)
    written = terms.Terms.__new__(terms.Terms)
    written.ids = terms.Ids(ids)
    assert value(number).device != value(ids).device
    assert not written.is_frozen(number)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert written.is_frozen(number)
