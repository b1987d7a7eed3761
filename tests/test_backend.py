"""The backend around the pass: options, the user's own passes, settings, reports.  The pass is a stand-in here."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import types
from collections.abc import Callable

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_grpo
from inductor_grpo import Rejection, Report, Rewrite, backend, config, loops
from inductor_grpo._compat import hooks
from inductor_grpo.backend import RewritePass
from inductor_grpo.config import Settings

Rewriter = Callable[[torch.fx.Graph, Settings], Report]
EAGER = {"grpo.codegen": "eager"}


class Seen(list):
    """The stand-in for the pass: one entry a call; ``report`` is what it returns."""

    report: Rewriter = staticmethod(lambda graph, settings: Report([Rewrite("engine", "two-pass", None, 100, 10, 4)]))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    calls = Seen()

    def rewrite_graph(graph: torch.fx.Graph, settings: Settings) -> Report:
        calls.append((graph, settings))
        return calls.report(graph, settings)

    module = types.ModuleType("inductor_grpo.passes")
    module.rewrite_graph = rewrite_graph  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inductor_grpo.passes", module)
    return calls


def loss(x: torch.Tensor, w: torch.Tensor, eps: float = 0.2) -> torch.Tensor:
    logp = torch.log_softmax(x @ w.t(), -1)
    return (torch.clamp(logp.exp(), 1 - eps, 1 + eps) * logp).sum() * x.shape[0]


def inputs(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)


def same_as_eager(fn: Callable[..., torch.Tensor], compiled: Callable[..., torch.Tensor], *args: object) -> None:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    want, got = fn(*args), compiled(*args)
    torch.testing.assert_close(got, want)
    for g, e in zip(torch.autograd.grad(got, tensors), torch.autograd.grad(want, tensors)):
        torch.testing.assert_close(g, e)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), want)


class Mark(CustomGraphPass):
    """A pass of the user that notes when it ran."""

    def __init__(self, order: list, name: str, uuid: str | None = "1") -> None:
        self.order, self.name, self.id = order, name, uuid

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.order.append(self.name)

    def uuid(self) -> str | None:
        return self.id


# Compiling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_codegen_eager_trains_and_infers(seen: Seen, dynamic: bool) -> None:
    order: list = []
    options = {**EAGER, "joint_custom_post_pass": Mark(order, "post")}
    compiled = torch.compile(loss, backend="inductor_grpo", dynamic=dynamic, options=options)
    for n in (5, 7):
        same_as_eager(loss, compiled, *inputs(n))
    assert len(seen) == len(order) == (2 if dynamic else 4)  # training and inference, by shape unless dynamic
    assert seen[0][1].codegen == "eager"


def test_full_inductor(seen: Seen) -> None:
    compiled = torch.compile(loss, backend="inductor_grpo")
    same_as_eager(loss, compiled, *inputs())
    assert len(seen) == 2 and seen[0][1] == Settings()


def test_codegen_eager_does_not_generate_code(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_code(*args: object, **kwargs: object) -> None:
        raise AssertionError("code was generated")

    monkeypatch.setattr(compile_fx_module, "fx_codegen_and_compile", no_code)
    same_as_eager(loss, torch.compile(loss, backend="inductor_grpo", options=EAGER), *inputs())


def test_a_float_that_changes_is_not_taken_from_a_cache(seen: Seen) -> None:
    # Stock torch.compile(dynamic=True) gives the numbers of the first eps for the later ones.
    x, w = inputs()
    with inductor_config.patch(force_disable_caches=False):
        for eps in (0.01, 0.02, 0.3):
            compiled = torch.compile(loss, backend="inductor_grpo", dynamic=True)
            torch.testing.assert_close(compiled(x, w, eps), loss(x, w, eps))


def test_mode_and_options_reach_inductor(seen: Seen) -> None:
    values: list = []

    def spy(graph: torch.fx.Graph, settings: Settings) -> Report:
        values.append((inductor_config.max_autotune, inductor_config.epilogue_fusion))
        return Report()

    seen.report = spy
    with config.patch(codegen="eager"):
        torch.compile(loss, backend="inductor_grpo", mode="max-autotune-no-cudagraphs")(*inputs())
        torch._dynamo.reset()
        torch.compile(loss, backend="inductor_grpo", options={"epilogue_fusion": False})(*inputs())
    assert values == [(True, True), (False, False)]
    with pytest.raises(BackendCompilerFailed, match="Unexpected optimization option no_such"):
        torch.compile(loss, backend="inductor_grpo", options={"no_such": 1})(*inputs())
    with pytest.raises(BackendCompilerFailed, match=r"unknown option 'grpo.no_such'"):
        torch.compile(loss, backend="inductor_grpo", options={"grpo.no_such": 1})(*inputs())


def test_the_users_passes_run_before_ours(seen: Seen) -> None:
    order: list = []
    seen.report = lambda graph, settings: order.append("ours") or Report()  # type: ignore[func-returns-value]
    with inductor_config.patch(joint_custom_pre_pass=Mark(order, "config")):
        torch.compile(loss, backend="inductor_grpo", options=EAGER)(*inputs())
        assert order == ["config", "ours"]
        order.clear()
        torch._dynamo.reset()
        options = {**EAGER, "joint_custom_pre_pass": Mark(order, "options")}
        torch.compile(loss, backend="inductor_grpo", options=options)(*inputs())
        assert order == ["options", "ours"]  # options win over the config, as in stock Inductor


@pytest.mark.parametrize("several", [False, True])
def test_appending_keeps_what_the_passes_say_about_caching(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_TAKES_SEVERAL", several)
    ours, order = RewritePass(Settings()), []
    assert hooks.append_pass(None, ours) is ours
    named = hooks.append_pass(hooks.append_pass(Mark(order, "a", "1"), Mark(order, "b", "2")), ours)
    unnamed = hooks.append_pass(Mark(order, "a", None), ours)
    plain = hooks.append_pass(order.append, ours)
    if several:
        assert [type(p) for p in named] == [Mark, Mark, RewritePass]
        assert [type(p) for p in unnamed] == [Mark, RewritePass] and len(plain) == 2
    else:
        assert named.uuid() == ("1", "2", ours.uuid())
        assert unnamed.uuid() is None and plain.uuid() is None
        hooks.append_pass(Mark(order, "a"), Mark(order, "b"))(torch.fx.Graph())
        assert order == ["a", "b"]


def test_the_bisector_can_switch_the_pass_off(seen: Seen) -> None:
    with inductor_config.patch(disabled_passes="inductor_grpo"):
        same_as_eager(loss, torch.compile(loss, backend="inductor_grpo", options=EAGER), *inputs())
    assert not seen


def test_uuid_covers_settings_environment_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        {},
        {"min_logits_bytes": 1},
        {"chunk_bytes": 1},
        {"schedule": "two-pass"},
        {"keep_bytes": 1},
        {"accumulate": "param"},
        {"require": True},
        {"disable": ("tiles",)},
        {"max_rewrites": 1},
        {"codegen": "eager"},
        {"generalise": False},
        {"row_kernel": "on"},
        {"filter_eps": 0.25},
    ]
    assert len(changes) == 1 + len(config._PARSERS)
    uuids = [RewritePass(Settings(**change)).uuid() for change in changes]
    assert len(set(uuids)) == len(changes)
    again = pickle.loads(pickle.dumps(RewritePass(Settings())))
    assert again == RewritePass(Settings()) and again.uuid() == uuids[0]
    monkeypatch.setenv("INDUCTOR_GRPO_SOMETHING", "1")
    assert again.uuid() != uuids[0]
    monkeypatch.undo()
    monkeypatch.setattr(backend, "source_hash", lambda: "other")
    assert again.uuid() != uuids[0]


# Failures and require ---------------------------------------------------------------------------------------


def test_a_fault_of_ours_leaves_the_graph_alone(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    def fault(graph: torch.fx.Graph, settings: Settings) -> Report:
        raise KeyError("oops")

    seen.report = fault
    same_as_eager(loss, torch.compile(loss, backend="inductor_grpo", options=EAGER), *inputs())
    report = inductor_grpo.last_report()
    assert report is not None and [r.code for r in report.rejections] == ["INTERNAL"]
    assert "KeyError" in report.rejections[0].message
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="KeyError"):
        torch.compile(loss, backend="inductor_grpo", options={**EAGER, "grpo.require": True})(*inputs())


def test_a_fault_before_the_rewrite_leaves_the_graph_alone(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(graph: torch.fx.Graph) -> bool:
        raise KeyError("oops")

    monkeypatch.setattr(loops, "cuts_unknown_sizes", fault)
    for dynamic in (False, None):  # None: traced with symbols first, and again as stock
        torch._dynamo.reset()
        same_as_eager(loss, torch.compile(loss, backend="inductor_grpo", options=EAGER, dynamic=dynamic), *inputs())
        report = inductor_grpo.last_report()
        assert report is not None and [r.code for r in report.rejections] == ["INTERNAL"]
        assert "KeyError" in report.rejections[0].message
    assert not seen


def test_require(seen: Seen) -> None:
    options = {**EAGER, "grpo.require": True}
    seen.report = lambda graph, settings: Report(rejections=[Rejection("NO_HEAD", "nothing to do")])
    torch.compile(loss, backend="inductor_grpo", options=options)(*inputs())
    torch._dynamo.reset()
    seen.report = lambda graph, settings: Report(rejections=[Rejection("RANDOM", "dropout on the logits")])
    with pytest.raises(BackendCompilerFailed, match="dropout on the logits") as caught:
        torch.compile(loss, backend="inductor_grpo", options=options)(*inputs())
    assert isinstance(caught.value.inner_exception, inductor_grpo.RequireError)


def test_a_torch_without_the_hook_compiles_as_stock(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "missing", lambda: "such a hook")
    monkeypatch.setattr(backend, "_can_rewrite", backend._can_rewrite.__wrapped__)
    monkeypatch.setattr(backend.log, "propagate", True)
    with caplog.at_level(logging.WARNING, "inductor_grpo"):
        same_as_eager(loss, torch.compile(loss, backend="inductor_grpo", options=EAGER), *inputs())
    assert "no such a hook" in caplog.text and not seen


# Plain Inductor ---------------------------------------------------------------------------------------------


def test_enabled_reaches_plain_inductor_and_restores(seen: Seen) -> None:
    order: list = []
    before = compile_fx_module.compile_fx
    with inductor_config.patch(joint_custom_pre_pass=Mark(order, "user")):
        with inductor_grpo.enabled({"grpo.chunk_bytes": 7}), config.patch(codegen="eager"):
            with inductor_grpo.enabled({"grpo.max_rewrites": 3}):
                same_as_eager(loss, torch.compile(loss), *inputs())
                assert seen[0][1] == Settings(chunk_bytes=7, max_rewrites=3, codegen="eager")
            torch._dynamo.reset()
            torch.compile(loss, options={"joint_custom_pre_pass": Mark(order, "option")})(*inputs())
            torch._dynamo.reset()
            torch.compile(loss, backend="inductor_grpo")(*inputs())  # our backend inside: once, by its own settings
            assert len(seen) == 4 and seen[3][1] == Settings(codegen="eager")
        assert isinstance(inductor_config.joint_custom_pre_pass, Mark)
    assert order == ["user", "user", "option", "user"]
    assert compile_fx_module.compile_fx is before and inductor_config.joint_custom_pre_pass is None
    assert inductor_grpo.last_report() == Report([Rewrite("engine", "two-pass", None, 100, 10, 4)])
    inductor_grpo.enable()
    inductor_grpo.disable()
    inductor_grpo.disable()
    assert compile_fx_module.compile_fx is before
    with pytest.raises(ValueError, match=r"grpo\.nothing"):
        inductor_grpo.enable({"grpo.nothing": 1})
    assert compile_fx_module.compile_fx is before


def test_suspended_leaves_plain_inductor_alone(seen: Seen) -> None:
    with inductor_grpo.enabled(EAGER), backend.suspended():
        torch.compile(lambda x: x + 1)(torch.ones(2))
    assert not seen


# Reports ----------------------------------------------------------------------------------------------------


def test_counters_log_and_last_report(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = Report([Rewrite("selective", "tiles", None, 1 << 20, 0, 3)], [Rejection("RANDOM", "dropout")])
    seen.report = lambda graph, settings: report
    monkeypatch.setattr(backend.log, "propagate", True)
    with caplog.at_level(logging.INFO, "inductor_grpo"):
        torch.compile(loss, backend="inductor_grpo", options=EAGER)(*inputs())
    assert inductor_grpo.last_report() == report
    assert [r.message for r in caplog.records] == ["1 rewrite, 1 rejection, 1.0 MiB saved [RANDOM]"]
    counts = {"rewrites": 1, "rejections": 1, "pattern:selective": 1, "rejected:RANDOM": 1}
    assert dict(counters["inductor_grpo"]) == counts


def test_threads_do_not_mix_their_reports(seen: Seen) -> None:
    both = threading.Barrier(2, timeout=60)
    one_at_a_time = threading.Lock()  # as Dynamo compiles; tracing itself is not safe in two threads
    found: dict[str, list[Report]] = {}

    def run(name: str) -> None:
        with backend.collected() as reports:
            both.wait()
            with one_at_a_time:
                module = torch.fx.symbolic_trace(torch.nn.ReLU())
                backend.inductor_grpo(module, [torch.ones(2 if name == "a" else 3)], options=EAGER)
            both.wait()
        found[name] = reports

    seen.report = lambda graph, settings: Report(
        rejections=[Rejection("RANDOM", str(next(iter(graph.nodes)).meta["val"].shape[0]))]
    )
    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: [r.message for report in reports for r in report.rejections] for name, reports in found.items()} == {
        "a": ["2"],
        "b": ["3"],
    }


def test_explain_merges_the_graphs_and_leaves_no_trace(seen: Seen) -> None:
    def broken(x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        first = loss(x, w) * scale
        torch._dynamo.graph_break()
        return first + loss(x, w)

    x, w = inputs()
    seen.report = lambda graph, settings: Report(rejections=[Rejection("RANDOM", "x")])
    compiled = torch.compile(broken, backend="eager")
    compiled(x, w)
    frames = counters["stats"]["unique_graphs"]
    with config.patch(require=True):  # explain reports, it does not raise
        assert len(inductor_grpo.explain(compiled, x, w, scale=2.0).rejections) == 2
        assert len(inductor_grpo.explain(broken, x, w).rejections) == 2
    before = counters["stats"]["unique_graphs"]
    assert before == frames + 4
    compiled(x, w)
    assert counters["stats"]["unique_graphs"] == before  # what was compiled before is still there
    assert x.grad is None and w.grad is None
    module = torch.nn.Linear(8, 16)
    assert len(inductor_grpo.explain(module, x).rejections) == 1
    assert len(inductor_grpo.explain(torch.compile(module), x).rejections) == 1
    assert not inductor_grpo.explain(lambda: None)
