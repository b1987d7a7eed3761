"""The backend beside what else a program may do with the compiler: passes, modes, stances, caches, threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_grpo
from inductor_grpo import config
from tests import harness

TOKENS, FEATURES, VOCABULARY = 23, 8, 61
CHUNK = 5 * VOCABULARY * 4


def loss(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    logp = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logp - old)
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


def inputs(tokens: int = TOKENS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, FEATURES, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, FEATURES, generator=generator, requires_grad=True)
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return [hidden, weight, labels, torch.randn(tokens, generator=generator) * 0.1 - 4]


def assert_right(call: Callable[..., Any], args: list[Any], function: Callable[..., Any] = loss) -> None:
    eager, truth = harness.run(function, args), harness.run(function, args, wide=True)
    ours = harness.run(call, args)
    found = harness.problems(ours, eager, truth, harness.floor(args))
    assert not found, "\n".join(found)


@contextlib.contextmanager
def streamed(regions: int = 1, graphs: int = 1) -> Iterator[harness.Graphs]:
    """What compiles in the block has so many graphs and regions, and no logits are left."""
    facts = harness.graph_facts(inputs())
    with harness.recording(facts):
        yield facts
    harness.assert_streamed(facts)
    assert (facts.count, facts.regions) == (graphs, regions), harness.reasons(facts.reports)


@contextlib.contextmanager
def everywhere(**more: Any) -> Iterator[None]:
    """Our settings without ``options=``, which torch does not take beside ``mode=``."""
    with config.patch(**{"min_logits_bytes": 0, "chunk_bytes": CHUNK, **more}):
        yield


# ---------------------------------------------------------------- passes of the user


class OtherBound(CustomGraphPass):
    """A pass of the user that changes the graph: the clamp to at least 0.8 and its backward take 0.4 instead."""

    def __init__(self) -> None:
        self.changed = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and 0.8 in node.args:
                node.args = tuple(0.4 if a == 0.8 else a for a in node.args)
                self.changed += 1

    def uuid(self) -> str:
        return "other bound"


def other_bound(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    logp = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logp - old)
    return -torch.min(ratio, ratio.clamp(0.4, 1.2)).mean()


@pytest.mark.parametrize("hook", ["joint_custom_pre_pass", "joint_custom_post_pass"])
def test_a_joint_pass_that_changes_the_graph(hook: str) -> None:
    own = OtherBound()
    args = inputs()
    eager, truth = harness.run(other_bound, args), harness.run(other_bound, args, wide=True)
    with harness.collecting() as reports, inductor_config.patch({hook: own}):
        ours = harness.run(harness.compiled(loss, CHUNK, schedule="two-pass"), args)
    assert own.changed == 2
    assert not harness.problems(ours, eager, truth, harness.floor(args))
    assert len([rewrite for report in reports for rewrite in report.rewrites]) == 1


def test_passes_after_the_graph_is_split() -> None:
    """They see our calls, in the forward and in the backward."""
    seen: list[set[str]] = []

    class Note(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append({str(node.target) for node in graph.nodes if node.op == "call_function"})

        def uuid(self) -> None:
            return None

    with streamed(), everywhere():
        with inductor_config.patch(post_grad_custom_pre_pass=Note(), post_grad_custom_post_pass=Note()):
            assert_right(torch.compile(loss, backend=harness.backend(), dynamic=False), inputs())
    assert [any("inductor_grpo" in name for name in names) for names in seen] == [True] * 4


# ---------------------------------------------------------------- ways to compile


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modes(mode: str) -> None:
    with streamed(), everywhere():
        assert_right(torch.compile(loss, backend=harness.backend(), mode=mode, dynamic=False), inputs())


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_fullgraph(dynamic: bool | None) -> None:
    with streamed():
        assert_right(harness.compiled(loss, CHUNK, fullgraph=True, dynamic=dynamic), inputs())


def test_a_method_a_module_and_a_decorator() -> None:
    class Head(nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> Tensor:
            return loss(hidden, weight, labels, old)

    options = harness.options(CHUNK)
    for make in (
        lambda: torch.compile(Head(), backend=harness.backend(), options=options),
        lambda: torch.compile(Head().forward, backend=harness.backend(), options=options),
        lambda: torch.compile(backend=harness.backend(), options=options)(loss),
    ):
        torch._dynamo.reset()
        with streamed():
            assert_right(make(), inputs())
    module = Head()
    module.compile(backend=harness.backend(), options=options)
    torch._dynamo.reset()
    with streamed():
        assert_right(module, inputs())


# ---------------------------------------------------------------- stances


def test_force_eager() -> None:
    call = harness.compiled(loss, CHUNK, dynamic=None)
    with harness.collecting() as reports, torch.compiler.set_stance("force_eager"):
        assert_right(call, inputs())
    assert not reports
    with streamed():
        assert_right(call, inputs())


@pytest.mark.parametrize("stance", ["eager_on_recompile", "fail_on_recompile"])
def test_stances_about_recompilation(stance: str) -> None:
    """Another number of tokens needs no compilation; another dtype does."""
    call = harness.compiled(loss, CHUNK, dynamic=None)
    with streamed():
        assert_right(call, inputs())
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs()]
    with harness.collecting() as reports, torch.compiler.set_stance(stance):
        for tokens in (TOKENS, TOKENS + 4, 1):
            assert_right(call, inputs(tokens))
        if stance == "eager_on_recompile":
            assert_right(call, wide)
        else:
            with pytest.raises(RuntimeError, match="fail_on_recompile"):
                call(*wide)
    assert not reports


@pytest.mark.parametrize("stance", ["eager_then_compile", "aot_eager_then_compile"])
def test_stances_that_compile_later(stance: str) -> None:
    call = harness.compiled(loss, CHUNK, dynamic=None)
    with streamed(), torch.compiler.set_stance(stance):
        for tokens in (TOKENS, TOKENS + 4, TOKENS + 9):
            assert_right(call, inputs(tokens))


def update(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    """A step with its backward inside: the gradients are in ``.grad``."""
    value = loss(hidden, weight, labels, old)
    value.backward()
    return value.detach()


def gradients(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(hidden, weight, labels, old), (hidden, weight))


def functional(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    return torch.func.grad(loss, argnums=(0, 1))(hidden.detach(), weight.detach(), labels, old)


@pytest.mark.parametrize("schedule, regions", [("auto", 1), ("two-pass", 3)])
def test_compiled_autograd(schedule: str, regions: int) -> None:
    """The backward of a compiled step is captured when it runs, and compiled by the same backend: it holds the calls
    that the backward of the step's graph was rewritten to."""
    counters.clear()
    with streamed(regions, graphs=3), torch._dynamo.config.patch(compiled_autograd=True):
        assert_right(harness.compiled(update, CHUNK, schedule=schedule), inputs(), update)
    assert counters["compiled_autograd"]["captures"] == 1


@pytest.mark.parametrize("function", [update, gradients, functional])
def test_a_backward_in_the_same_graph(function: Callable[..., Any]) -> None:
    """Dynamo traces the backward into the graph: it has no tangents, and is one forward."""
    if function is not functional and not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not trace a backward")
    traced = contextlib.nullcontext()
    if function is not functional:
        traced = torch._dynamo.config.patch(trace_autograd_ops=True)
    with streamed() as facts, traced:
        assert_right(harness.compiled(function, CHUNK, fullgraph=True), inputs(), function)
    assert facts.matmuls == 3


# ---------------------------------------------------------------- several compiled functions


def test_compiled_blocks_and_a_compiled_head() -> None:
    """Regional compilation: the blocks share one graph, the head and the loss have theirs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.nn.functional.silu(self.up(x)))

    blocks = nn.ModuleList([Block() for _ in range(3)])
    wide = nn.ModuleList([Block() for _ in range(3)]).double()
    wide.load_state_dict(blocks.state_dict())
    head = harness.compiled(loss, CHUNK)

    def through(layers: nn.ModuleList, last: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def step(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> Tensor:
            for layer in layers:
                hidden = layer(hidden)
            return last(hidden, weight, labels, old)

        return step

    args = inputs()
    eager, truth = harness.run(through(blocks, loss), args), harness.run(through(wide, loss), args, wide=True)
    for block in blocks:
        block.compile(backend=harness.backend(), options=harness.options(CHUNK))
    with streamed(graphs=2) as facts:
        ours = harness.run(through(blocks, head), args)
    assert not harness.problems(ours, eager, truth, harness.floor(args))
    assert sorted(len(report.rewrites) for report in facts.reports) == [0, 1]


def test_policy_reference_and_reward() -> None:
    """Three functions with settings of their own, called in turn; none takes another's graph or settings."""

    def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return (hidden @ weight.t()).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def reward(hidden: Tensor, value_head: Tensor) -> Tensor:
        return torch.sigmoid(hidden @ value_head).mean()

    policy = harness.compiled(loss, CHUNK)
    reference = harness.compiled(log_probs, 2 * CHUNK)
    score = harness.compiled(reward, CHUNK)
    untouched = torch.compile(loss, backend="aot_eager", dynamic=False)
    value_head = torch.randn(FEATURES)
    with streamed(regions=2, graphs=3) as facts:
        for seed in range(2):
            args = inputs(seed=seed)
            assert_right(policy, args)
            with torch.no_grad():
                torch.testing.assert_close(reference(*args[:3]), log_probs(*args[:3]))
            assert_right(score, [args[0], value_head], reward)
            assert_right(untouched, args)
    assert [[r.schedule for r in report.rewrites] for report in facts.reports] == [
        ["one-pass"],
        ["forward, vocabulary tiles"],
        [],
    ]


def test_one_function_with_two_settings() -> None:
    args = inputs()
    with streamed(regions=3, graphs=2) as facts:
        for schedule in ("auto", "two-pass"):
            assert_right(harness.compiled(loss, CHUNK, schedule=schedule, disable="tiles"), args)
    assert [report.rewrites[0].schedule for report in facts.reports] == ["one-pass", "two-pass"]


def test_the_cache_of_a_process() -> None:
    """A second compilation of the same function is answered by the caches, report included."""
    args = inputs()
    counters.clear()
    with inductor_config.patch(force_disable_caches=False), everywhere():
        for _ in range(2):
            torch._dynamo.reset()
            assert_right(torch.compile(loss, backend=harness.backend(), dynamic=False), args)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    report = inductor_grpo.last_report()
    assert report is not None and report.from_cache and len(report.rewrites) == 1


# ---------------------------------------------------------------- threads


@pytest.mark.parametrize("same, codegen", [(True, "eager"), (False, "eager"), (False, "inductor")])
def test_threads(same: bool, codegen: str) -> None:
    """Threads compile and run at the same time; each gets its own numbers and its own reports."""
    shared = harness.compiled(loss, CHUNK, dynamic=None, codegen=codegen)
    start = threading.Barrier(3, timeout=60)
    failures: list[BaseException] = []
    reports: list[int] = []

    def work(seed: int) -> None:
        def own(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor) -> Tensor:
            return loss(hidden, weight, labels, old) * (seed + 1)

        call, function = (shared, loss) if same else (harness.compiled(own, CHUNK, dynamic=None, codegen=codegen), own)
        try:
            start.wait()
            with harness.collecting() as found:
                for step in range(3):
                    args = inputs(TOKENS + 3 * step, seed=seed)
                    eager = harness.run(function, args)
                    ours = harness.run(call, args)
                    for (name, a), (_, b) in zip(ours.values(), eager.values(), strict=True):
                        if a is not None and b is not None:
                            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
            reports.append(sum(len(report.rewrites) for report in found))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    if same:  # as in stock, each thread that finds no code compiles
        assert 1 <= sum(reports) <= 3
    else:
        assert reports == [1, 1, 1]
