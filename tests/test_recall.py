"""What became symbolic is kept for the next process: one trace less, and never another number."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslator

from inductor_grpo import backend, config, generalise
from inductor_grpo._compat import first_trace, frames
from inductor_grpo.recall import Given
from tests import test_one_compile as one
from tests.test_one_compile import assert_as_eager, compiled, graphs, packed, seam

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Caches of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with inductor_config.patch(force_disable_caches=False):
        yield tmp_path / "cache" / "inductor_grpo" / "frames"


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that Dynamo began to trace, in order."""
    found: list[str] = []
    original = InstructionTranslator.__init__

    @functools.wraps(original)
    def init(self: Any, instructions: Any, code: Any, *args: Any, **kwargs: Any) -> None:
        found.append(code.co_name)
        original(self, instructions, code, *args, **kwargs)

    monkeypatch.setattr(InstructionTranslator, "__init__", init)
    return found


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.marks"))


def again() -> None:
    """As far as Dynamo goes, a new process."""
    torch._dynamo.reset()


# What is gained ---------------------------------------------------------------------------------------------


def test_the_next_process_begins_with_the_second_trace(folder: Path, traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    assert traces == ["seam"] * 2 and len(entries(folder)) == 1
    again()
    traces.clear()
    before = graphs()
    call = compiled(seam)
    for step, (tokens, segments) in enumerate([(17, 1), *one.STEPS]):
        assert_as_eager(seam, call, packed(tokens, segments, 1.0 + step, 0.5 + step / 7), (tokens, segments))
    assert traces == ["seam"] and graphs() - before == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [(1, 1), (0, 0), (1, 2), (0, 3), (64, 64)], ids=str)
@pytest.mark.parametrize("keywords", [{}, {"fullgraph": True}], ids=str)
def test_any_call_may_be_the_first(first: tuple[int, int], keywords: dict[str, Any], traces: list[str]) -> None:
    compiled(seam, **keywords)(*packed(64, 5))
    again()
    traces.clear()
    before = graphs()
    call = compiled(seam, **keywords)
    for step, (tokens, segments) in enumerate([first, *one.STEPS]):
        assert_as_eager(seam, call, packed(tokens, segments, 1.0 + step), (tokens, segments))
    assert traces == ["seam"] and graphs() - before == 1


@pytest.mark.parametrize("first", [0, 2, 4, 5])
def test_heads(first: int, traces: list[str]) -> None:
    """As many tokens as features among them."""
    compiled(one.head_seam)(*one.with_head(64, 5, 2.0, True))
    again()
    traces.clear()
    before = graphs()
    call = compiled(one.head_seam)
    for step, (tokens, segments) in enumerate([*one.WITH_HEAD[first:], *one.WITH_HEAD[:first]]):
        assert_as_eager(one.head_seam, call, one.with_head(tokens, segments, 1.0 + step, True), (tokens, segments))
    assert traces == ["head_seam"] and graphs() - before == 1


def test_methods_and_what_they_hold(traces: list[str]) -> None:
    class Loss:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __call__(self, logp: Tensor, ids: Tensor, count: int) -> Tensor:
            return (logp.new_zeros(count).index_add_(0, ids, logp) * self.scale).exp().sum()

    def run(loss: Loss, call: Callable[..., Tensor], tokens: int, count: int) -> None:
        logp, ids = torch.randn(tokens) * 0.1, torch.arange(tokens) % count
        assert torch.allclose(call(logp, ids, count), loss(logp, ids, count))

    for scale, traced in ((2.0, 2), (3.0, 1)):
        again()
        traces.clear()
        loss = Loss(scale)
        call = compiled(loss)
        for tokens, count in ((12, 3), (7, 5), (1, 1)):
            run(loss, call, tokens, count)
        assert len(traces) == traced


PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch._dynamo.symbolic_convert import InstructionTranslator
from inductor_grpo import backend
from tests.test_one_compile import packed, seam

traces, init = [], InstructionTranslator.__init__
InstructionTranslator.__init__ = lambda self, *a, **k: (traces.append(1), init(self, *a, **k))[1]
low, tokens, divisor = json.loads(sys.argv[1])
args = [*packed(tokens, 5, divisor), 1.0, low, 2 * low][:8] + [1.0, low, 2 * low]
call = torch.compile(seam, backend=backend.inductor_grpo)
found = [[call(*args)[0].item(), seam(*args)[0].item()]]
again = [*packed(tokens + 9, 3, divisor + 1)][:8] + [2.0, low, 2 * low]
found.append([call(*again)[0].item(), seam(*again)[0].item()])
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([found, hits, len(traces), counters["stats"]["unique_graphs"]]))
"""


def test_processes(tmp_path: Path) -> None:
    """One trace, and the graph comes from the cache; a bound that changes is looked at anew."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shared"), "PYTHONPATH": str(ROOT)}
    found = []
    for given in ([0.01, 64, 2.0], [0.01, 17, 3.0], [0.05, 64, 2.0], [0.05, 30, 7.0]):
        command = [sys.executable, "-c", PROGRAM, json.dumps(given)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        values, *counts = json.loads(done.stdout.splitlines()[-1])
        assert all(abs(ours - eager) <= 1e-6 for ours, eager in values), values
        found.append(counts)
    assert found == [[0, 2, 1], [1, 1, 1], [0, 2, 1], [1, 1, 1]]


# What is not recalled ---------------------------------------------------------------------------------------


def test_another_bound_or_scale_that_was_none(traces: list[str]) -> None:
    """What is left alone is left alone for its value."""
    compiled(seam)(*packed(64, 5), 0.01, 0.02)
    for low, traced in ((0.03, 2), (0.03, 1), (0.01, 2)):
        again()
        traces.clear()
        assert_as_eager(seam, compiled(seam), [*packed(33, 4), low, 0.02], low)
        assert len(traces) == traced


SOURCE = """
def loss(logp, ids, count, bound):
    sums = logp.new_zeros(count).index_add_(0, ids, logp)
    return {}
"""


def module(path: Path, source: str, stamp: int) -> Any:
    path.write_text(source)
    os.utime(path, ns=(stamp, stamp))
    importlib.invalidate_caches()
    specification = importlib.util.spec_from_file_location("of_test_recall", path)
    assert specification is not None and specification.loader is not None
    found = importlib.util.module_from_spec(specification)
    exec(compile(source, str(path), "exec"), found.__dict__)
    return found


@pytest.mark.parametrize("same_stamp", [False, True])
def test_other_code_at_the_same_place(tmp_path: Path, traces: list[str], same_stamp: bool) -> None:
    """Also where the file seems to be the same."""
    bodies = ["(sums * bound).exp().sum()", "(sums + bound).exp().sum()", "sums.clamp(-bound, bound).exp()"]
    args = [torch.randn(9), torch.arange(9) % 4, 4, 0.25]
    for step, body in enumerate(bodies):
        again()
        traces.clear()
        stamp = 10**18 + (0 if same_stamp else step * 10**9)
        loss = module(tmp_path / "of_test.py", SOURCE.format(body), stamp).loss
        for bound in (0.25, 0.5):
            assert torch.allclose(compiled(loss)(*args[:3], bound), loss(*args[:3], bound))
        assert traces[:2] == ["loss"] * 2


def test_a_function_that_is_called_has_changed(tmp_path: Path, traces: list[str]) -> None:
    inner = "def inner(x, bound):\n    return {}\n"
    args = [torch.randn(9), torch.arange(9) % 4, 4]

    def outer(logp: Tensor, ids: Tensor, count: int, bound: float) -> Tensor:
        return helper(logp.new_zeros(count).index_add_(0, ids, logp), bound)

    for step, body in enumerate(["(x * bound).exp().sum()", "x.clamp(-bound, bound).exp().sum()"]):
        again()
        traces.clear()
        helper = module(tmp_path / "of_test.py", inner.format(body), 10**18 + step * 10**9).inner
        for bound in (0.25, 0.5):
            assert torch.allclose(compiled(outer)(*args, bound), outer(*args, bound))
        assert traces[:2] == ["outer"] * 2


@pytest.mark.parametrize(
    "change",
    [{"options": {"grpo.accumulate": "param"}}, {"options": {"epilogue_fusion": False}}, {"dynamic": True}],
    ids=str,
)
def test_other_options(change: dict[str, Any], traces: list[str], folder: Path) -> None:
    compiled(seam)(*packed(64, 5))
    again()
    traces.clear()
    assert_as_eager(seam, compiled(seam, **change), packed(65, 4), change)
    assert len(traces) == 2


@pytest.mark.parametrize("change", [{"dynamic": False}, {"options": {"grpo.generalise": False}}], ids=str)
def test_options_that_ask_for_shapes_as_in_stock(change: dict[str, Any], traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    again()
    traces.clear()
    before = graphs()
    call = compiled(seam, **change)
    for tokens in (64, 65):
        assert_as_eager(seam, call, packed(tokens, 5), change)
    assert len(traces) == 2 and graphs() - before == 2


def test_other_modes(traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    again()
    traces.clear()
    with torch.no_grad():
        compiled(seam)(*packed(64, 5))
    assert len(traces) == 2


def test_dimensions_that_the_user_marked(traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    again()
    traces.clear()
    args = packed(64, 5)
    torch._dynamo.mark_static(args[1], 0)
    torch.testing.assert_close(compiled(seam)(*args), seam(*args))
    assert len(traces) > 1 and args[1]._dynamo_static_indices == {0}


def test_without_caches_nothing_is_kept(folder: Path, traces: list[str]) -> None:
    with inductor_config.patch(force_disable_caches=True):
        for _ in range(2):
            again()
            compiled(seam)(*packed(64, 5))
    assert len(traces) == 4 and not entries(folder)


def test_other_backends_are_traced_as_ever(traces: list[str], folder: Path) -> None:
    compiled(seam)(*packed(64, 5))
    again()
    traces.clear()
    before = graphs()
    call = torch.compile(seam, backend="aot_eager")
    for tokens in (64, 65):
        assert_as_eager(seam, call, packed(tokens, 5), tokens)
    assert len(traces) == 2 and graphs() - before == 2


def test_the_backend_is_found_behind_what_dynamo_wraps_around_it() -> None:
    ours, found = backend.inductor_grpo, []

    def see(gm: torch.fx.GraphModule, _: Any) -> Any:
        return gm.forward

    for given, options in (
        (
            torch._TorchCompileWrapper(ours, "max-autotune", {"a": 1}, None),
            {"mode": "max-autotune", "options": {"a": 1}},
        ),
        (functools.partial(ours, options={"a": 1}), {"options": {"a": 1}}),
        (ours, {}),
        (see, None),
        (torch._TorchCompileWrapper("aot_eager", None, None, None), None),
        (functools.partial(ours, None), None),
    ):
        assert first_trace.options_of(given, ours) == options
        found.append(given)
    assert first_trace.options_of(None, ours) is None


# What does not do -------------------------------------------------------------------------------------------


def test_a_size_that_is_broadcast_in_this_call(traces: list[str], folder: Path) -> None:
    def loss(logits: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
        return (one.by_log_softmax(logits, labels, 1.0) * advantages).sum()

    def of(time: int) -> list[Any]:
        return [*one.of_logits(2, 5 if time == 1 else time, 1.0)[:2], torch.linspace(-1, 1, time)]

    compiled(loss)(*of(6))
    again()
    traces.clear()
    call = compiled(loss)
    for time in (1, 5, 1, 7):
        assert_as_eager(loss, call, of(time), time)
    assert traces[:2] == ["loss"] * 2
    again()  # of what was learned with the 1, another process would know too little
    call, before = compiled(loss), graphs()
    for time in (5, 6, 7):
        assert_as_eager(loss, call, of(time), time)
    assert graphs() - before == 1


def edit(folder: Path, **changes: Any) -> None:
    (entry,) = entries(folder)
    entry.write_text(json.dumps({**json.loads(entry.read_text()), **changes}))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"inputs": 3}', "\x00", '{"codes": [], "floats": {}, "inputs": [[]]}']
)
def test_an_entry_that_is_none(text: str, folder: Path, traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    (entry,) = entries(folder)
    entry.write_text(text)
    again()
    traces.clear()
    assert_as_eager(seam, compiled(seam), packed(65, 4), text)
    assert len(traces) == 2


def changed(inputs: list[list[Any]], name: str, rest: Any) -> list[list[Any]]:
    return [[n, kind, rest if n == name else was] for n, kind, was in inputs]


def test_sources_are_paths_and_no_code(folder: Path, traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    (entry,) = entries(folder)
    inputs = json.loads(entry.read_text())["inputs"]
    edit(folder, inputs=[*inputs, ["[][1]", "int", None], ["__import__('os').getpid()", "int", None]])
    again()
    traces.clear()
    assert_as_eager(seam, compiled(seam), packed(65, 4), "code")
    assert len(traces) == 2


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_an_entry_that_marks_a_bound(folder: Path, codegen: str) -> None:
    """As if the bound of the clip were a factor: its values stay its own, cached or not."""
    with config.patch(codegen=codegen):
        call = functools.partial(torch.compile, seam, backend="inductor_grpo")
        args = [*packed(64, 5), 0.01, 0.02]
        call()(*args)
        (entry,) = entries(folder)
        found = json.loads(entry.read_text())
        wrong = {
            "inputs": changed(found["inputs"], "L['low']", None),
            "floats": {**found["floats"], "L['low']": [found["code"]]},
        }
        for low in (0.01, 0.05, 0.2, 0.01):
            entry.write_text(json.dumps({**found, **wrong}))
            again()
            args[9] = low
            torch.testing.assert_close(call()(*args)[0], seam(*args)[0])


@pytest.mark.parametrize("name", ["L['hidden']", "L['weight']"])
def test_an_entry_that_marks_features(name: str, folder: Path) -> None:
    args = one.with_head(64, 5, 2.0, False)
    compiled(one.head_seam)(*args)
    (entry,) = entries(folder)
    found = json.loads(entry.read_text())
    entry.write_text(json.dumps({**found, "inputs": changed(found["inputs"], name, [None, None])}))
    again()
    call = compiled(one.head_seam)
    for step, (tokens, segments) in enumerate(one.WITH_HEAD):
        assert_as_eager(one.head_seam, call, one.with_head(tokens, segments, 1.0 + step, False), (tokens, segments))


def test_an_entry_that_ends_elsewhere_is_removed(folder: Path, traces: list[str]) -> None:
    compiled(seam)(*packed(64, 5))
    edit(folder, end=[["elsewhere.py", 3]])
    again()
    traces.clear()
    before = graphs()
    call = compiled(seam)
    for tokens, segments in one.STEPS:
        assert_as_eager(seam, call, packed(tokens, segments), (tokens, segments))
    assert len(traces) == 3 and graphs() - before == 1
    again()
    traces.clear()
    compiled(seam)(*packed(64, 5))  # the one that the three traces left
    assert len(traces) == 1


def sums(logp: Tensor, ids: Tensor, count: int) -> Tensor:
    return logp.new_zeros(count).index_add_(0, ids, logp).exp().sum()


def sums_unless_none(logp: Tensor, ids: Tensor, count: int) -> Tensor:
    return sums(logp, ids, count) if count > 0 else logp.sum() * 0.0


def test_a_branch_on_a_count(folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot do without a value leaves no entry, and one that says it can is removed."""
    args = [torch.randn(9), torch.arange(9) % 4, 4]
    compiled(sums_unless_none)(*args)
    assert not entries(folder)
    compiled(sums)(*args)
    (entry,) = entries(folder)
    edit(folder, code=frames.code_name(sums_unless_none.__code__))
    monkeypatch.setattr(generalise.recall, "place", lambda *_: entry)
    again()
    traces.clear()
    call = compiled(sums_unless_none)
    for tokens, count in ((9, 4), (7, 3), (3, 1), (0, 0)):
        given = [torch.randn(tokens), torch.arange(tokens) % max(count, 1), count]
        assert torch.allclose(call(*given), sums_unless_none(*given))
    assert len(traces) > 3 and not entry.exists()


@pytest.mark.parametrize("name", ["place", "load", "store", "choice"])
def test_a_surprise_costs_a_trace(name: str, monkeypatch: pytest.MonkeyPatch, traces: list[str]) -> None:
    def surprise(*_: object) -> None:
        raise AttributeError("torch has changed")

    monkeypatch.setattr(generalise.recall, name, surprise)
    call = compiled(seam)
    for tokens, segments in one.STEPS:
        assert_as_eager(seam, call, packed(tokens, segments), (tokens, segments))


def test_what_fits() -> None:
    whole, marked = Given("L['x']", "tensor", [4, 2]), Given("L['x']", "tensor", [None, 2])
    assert whole.fits(torch.ones(4, 2)) and not whole.fits(torch.ones(5, 2)) and not whole.fits(torch.ones(4))
    assert marked.fits(torch.ones(9, 2)) and not marked.fits(torch.ones(9, 3)) and not marked.fits(3)
    assert not marked.fits(torch.nn.Parameter(torch.ones(9, 2))) and whole.fits(torch.nn.Parameter(torch.ones(4, 2)))
    assert not marked.fits(torch.ones(9, 2).to_sparse())
    count, number = Given("L['n']", "int", None), Given("L['n']", "int", 3)
    assert count.fits(0) and not count.fits(-1) and not count.fits(True) and not count.fits(1.0)
    assert number.fits(3) and not number.fits(4) and not number.fits(3.0)
    scale = Given("L['s']", "float", None)
    assert scale.fits(2.0) and not scale.fits(float("nan")) and not scale.fits(2)
    assert dataclasses.replace(scale, rest=0.5).fits(0.5) and not dataclasses.replace(scale, rest=0.5).fits(0.25)
