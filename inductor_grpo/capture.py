"""``with inductor_grpo.capture() as c:`` keeps what happens while graphs compile: stages, programs, code, reports.

Without an open capture each hook here is one test of an empty list.  Captures are of the whole process: backward graphs
can compile in autograd's threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.fx as fx

from inductor_grpo._compat import hooks, watching
from inductor_grpo.breaks import GraphBreak, break_after
from inductor_grpo.report import Report


@dataclasses.dataclass(frozen=True)
class Stage:
    """A graph at one point of its compilation; ``graph`` is a copy that stays as it was.

    In order: "joint" (as AOTAutograd made it), "normalised", "streamed" (where sums per segment are rewritten after the
    logits), "rewritten"; then "forward" and "backward", or "inference", as the partitioner cut it.
    """

    name: str
    graph: fx.Graph


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a chunk program with the users' lines; ``patterns`` took part in it, ``values`` are what it gives,
    ``needs_logits`` whether it has to have the logits of its rows: it gives gradients, or keeps logits."""

    graph: fx.Graph
    values: tuple[fx.Node, ...]
    patterns: tuple[str, ...]
    needs_logits: bool


@dataclasses.dataclass
class Trial:
    """How often a pattern or a rule was tried and took something, and how long that took (patterns only)."""

    tries: int = 0
    hits: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class CompiledGraph:
    """One compilation of one graph of Dynamo's."""

    number: int
    stages: list[Stage] = dataclasses.field(default_factory=list)
    bodies: list[Body] = dataclasses.field(default_factory=list)
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    """Inductor's generated source, by stage name; none with ``grpo.codegen="eager"``."""
    report: Report = dataclasses.field(default_factory=Report)
    graph_break: GraphBreak | None = None
    """The break that the graph ends with."""
    notes: list[str] = dataclasses.field(default_factory=list)
    trials: dict[str, Trial] = dataclasses.field(default_factory=dict)
    """By the name of a pattern or of a rule's class."""
    seconds: float = 0.0
    """From Dynamo's graph to a function that runs."""
    done: bool = False

    def stage(self, name: str) -> fx.Graph | None:
        """The graph of the last stage with that name."""
        return next((s.graph for s in reversed(self.stages) if s.name == name), None)

    @property
    def from_cache(self) -> bool:
        """Inductor's caches answered: there are no stages, and the report is that of the run that filled them."""
        return self.report.from_cache


@dataclasses.dataclass
class Capture:
    """The graphs that were compiled, in the order in which they started."""

    graphs: list[CompiledGraph] = dataclasses.field(default_factory=list)
    codegen: str | None = None
    """Overrides ``grpo.codegen`` of the compilations."""

    @property
    def report(self) -> Report:
        """All reports as one; graphs without a head are left out where there is other news."""
        merged = sum((graph.report for graph in self.graphs), Report())
        if merged.rewrites or merged.obstacles:
            merged.rejections = merged.obstacles
        return merged

    @property
    def breaks(self) -> list[GraphBreak]:
        """The graph breaks between the graphs."""
        return [graph.graph_break for graph in self.graphs if graph.graph_break is not None]

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "nothing was compiled: a function that was compiled before keeps its code;"
                " inductor_grpo.capture(fresh=True) forgets it"
            )
        return "\n".join(str(graph.report) for graph in self.graphs)


_captures: list[Capture] = []
_lock = threading.RLock()
_open: contextvars.ContextVar[_Open | None] = contextvars.ContextVar("inductor_grpo_open", default=None)


@dataclasses.dataclass(frozen=True)
class _Open:
    """A compilation that runs, the one that it runs inside of, and the captures that see it."""

    graph: CompiledGraph
    started: float
    outer: _Open | None


@contextlib.contextmanager
def capture(*, fresh: bool = False, codegen: str | None = None) -> Iterator[Capture]:
    """Keeps every compilation that starts in the block, in all threads; see :class:`Capture`.

    ``fresh`` forgets compiled functions first (``torch._dynamo.reset()``) and turns Inductor's caches off in the block,
    so that functions compiled earlier compile again.  ``codegen`` ("eager", "inductor") overrides ``grpo.codegen``.
    """
    found = Capture(codegen=codegen)
    with contextlib.ExitStack() as stack:
        if fresh:
            stack.enter_context(watching.no_caches())
        with _lock:
            _captures.append(found)
        try:
            yield found
        finally:
            with _lock:
                _captures[:] = [c for c in _captures if c is not found]  # equal ones may be open, too


# Hooks of the backend and the pass ---------------------------------------------------------------------------


def requested_codegen(default: str) -> str:
    """The code generation that the innermost capture asks for."""
    return next((c.codegen for c in reversed(_captures) if c.codegen), default)


def tried(name: str, hit: bool, seconds: float = 0.0) -> None:
    """A pattern or a rule was tried."""
    current = _open.get() if _captures else None
    if current is not None:
        trial = current.graph.trials.setdefault(name, Trial())
        trial.tries, trial.hits, trial.seconds = trial.tries + 1, trial.hits + hit, trial.seconds + seconds


CompileFx = Callable[..., Any]


def begin_compilation(gm: Any = None) -> Callable[[CompileFx], CompileFx] | None:
    """A compilation starts.  Returns a wrapper for Inductor's ``inner_compile`` that keeps the partitioned graphs and
    the code made of them; None without a capture."""
    if not _captures:
        return None
    with _lock:
        graph = CompiledGraph(number=max((len(c.graphs) for c in _captures), default=0) + 1)
        graph.graph_break = break_after(gm)
        for c in _captures:
            c.graphs.append(graph)
    _open.set(_Open(graph, time.perf_counter(), _open.get()))
    return functools.partial(_watched, graph)


def observe(stage: str, graph: fx.Graph) -> None:
    """A graph reached ``stage``: kept by an open capture, and written to TORCH_TRACE when that is on."""
    hooks.trace_artifact(f"inductor_grpo_{stage}", lambda: _text(graph), encoding="string")
    if not _captures:
        return
    if _open.get() is None:
        begin_compilation()
    current = _open.get()
    assert current is not None
    stages = current.graph.stages
    if stages and stages[-1].name == stage:  # the region was refused, and the pass started again
        stages.pop()
    stages.append(Stage(stage, copy_of(graph)))


def observe_body(
    graph: fx.Graph, values: Sequence[fx.Node], patterns: Sequence[str] | None, needs_logits: bool
) -> None:
    """The body of a chunk program was written."""
    current = _open.get() if _captures else None
    if current is not None:
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        copy.graph_copy(graph, env)
        kept = tuple(env[v] for v in values)
        current.graph.bodies.append(Body(copy, kept, tuple(patterns or ()), needs_logits))


def note(text: str) -> None:
    """A remark on the compilation that runs."""
    current = _open.get() if _captures else None
    if current is not None and text not in current.graph.notes:
        current.graph.notes.append(text)


def _watched(record: CompiledGraph, inner_compile: CompileFx) -> CompileFx:
    def inner(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        part = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        record.stages.append(Stage(part, copy_of(gm.graph)))
        compiled = inner_compile(gm, example_inputs, **kwargs)
        source = getattr(compiled, "source_code", None)
        if isinstance(source, str) and source:
            record.code[part] = source
        return compiled

    return inner


def end_compilation(report: Report) -> None:
    """The compilation that :func:`begin_compilation` started is over."""
    if not _captures and _open.get() is None:
        return
    if _open.get() is None:
        begin_compilation()
    current = _open.get()
    if current is None:
        return
    current.graph.report, current.graph.done = report, True
    current.graph.seconds = time.perf_counter() - current.started
    _open.set(current.outer)


def drop_compilation() -> None:
    """The compilation that :func:`begin_compilation` started is given up: Dynamo traces the function again."""
    current = _open.get()
    if current is None:
        return
    with _lock:
        for c in _captures:
            c.graphs[:] = [graph for graph in c.graphs if graph is not current.graph]
    _open.set(current.outer)


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A copy with the same meta data, which nobody else changes."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, env)
    copy.output(result)
    for node in graph.nodes:
        if node.op == "output":
            continue
        env[node].meta = dict(node.meta)
    copy.owning_module = graph.owning_module
    return copy


def _text(graph: fx.Graph) -> str:
    from inductor_grpo import canonical

    return canonical.text(graph)
