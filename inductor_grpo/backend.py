"""The backend: Inductor with one more pass over the joint forward and backward graph.

``torch.compile(fn, backend="inductor_grpo", mode=..., options=...)`` is the stock Inductor backend in everything but
that pass.  Options that start with ``grpo.`` are ours (see :mod:`inductor_grpo.config`); the rest reach Inductor
unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inductor_grpo import breaks, config, files, generalise
from inductor_grpo._compat import hooks
from inductor_grpo.capture import begin_compilation, drop_compilation, end_compilation, requested_codegen
from inductor_grpo.config import Settings
from inductor_grpo.report import Rejection, Report, RequireError

if TYPE_CHECKING:
    from inductor_grpo._compat.first_trace import Beginning
    from inductor_grpo._compat.frames import Frame
    from inductor_grpo._compat.retrace import Step

log = logging.getLogger("inductor_grpo")

PASS_NAME = "inductor_grpo"


class _Session:
    """What the pass leaves behind while one graph compiles."""

    def __init__(self, frame: Frame | None = None) -> None:
        self.frame = frame
        self.decisions = frame.decisions() if frame is not None else (0, frozenset())
        self.called = False
        self.graph_break: breaks.GraphBreak | None = None
        self.report = Report()

    def record(self, report: Report) -> None:
        self.called = True
        self.report = self.report + report


# Context variables: two threads compile at once, and a compilation can start another.
_session: contextvars.ContextVar[_Session | None] = contextvars.ContextVar("inductor_grpo_session", default=None)
_collected: contextvars.ContextVar[list[Report] | None] = contextvars.ContextVar(
    "inductor_grpo_collected", default=None
)
_suspended: contextvars.ContextVar[bool] = contextvars.ContextVar("inductor_grpo_suspended", default=False)
_last_report: Report | None = None


# The pass ---------------------------------------------------------------------------------------------------


class RewritePass(hooks.GraphPass):
    """The pass in the form that Inductor takes: callable, picklable, and named by what its result depends on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, graph: torch.fx.Graph) -> None:
        if _suspended.get():
            return
        session = _session.get()
        if session is not None and session.frame is not None and generalise.watches_floats(session.frame):
            generalise.check_floats(session.frame, session.decisions)
        hooks.run_observed(graph, PASS_NAME, self._run)

    def uuid(self) -> str:
        """The cache key: our sources, every setting, our environment and torch's version."""
        parts = (source_hash(), self.settings, hooks.environment(config.ENV_PREFIX), torch.__version__)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RewritePass) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(self.settings)

    def _run(self, graph: torch.fx.Graph) -> None:
        session = _session.get()
        report, cut_up = self._rewrite(graph)
        report = breaks.name_breaks(report, graph, session.graph_break if session else None)
        if session is not None:
            generalise.check_report(session.frame, report, cut_up)
        if session is None:
            _publish(report)
        else:
            session.record(report)
        if self.settings.require and report.obstacles:
            raise RequireError(report)

    def _rewrite(self, graph: torch.fx.Graph) -> tuple[Report, bool]:
        """What became of the graph, and whether it cuts what may be rows into pieces that nobody can put together."""
        cut_up = False
        try:
            from inductor_grpo.loops import cuts_unknown_sizes
            from inductor_grpo.passes import rewrite_graph

            cut_up = cuts_unknown_sizes(graph)  # before the rewrite, which leaves no loop to be seen
            return rewrite_graph(graph, self.settings), cut_up
        except Rejection as rejection:
            return Report(rejections=[rejection]), cut_up
        except Exception as error:  # a fault of ours must not cost the user the compilation
            log.warning("the rewrite failed and the graph stays as it was", exc_info=True)
            message = f"{type(error).__name__}: {error}; please report this"
            return Report(rejections=[Rejection("INTERNAL", message)]), cut_up


@functools.cache
def source_hash() -> str:
    """A hash of the sources of the package and its patterns."""
    digest = hashlib.sha256()
    import inductor_grpo

    patterns = importlib.import_module("inductor_grpo.patterns")
    for folder in map(Path, (*inductor_grpo.__path__, *patterns.__path__)):
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


# The backend ------------------------------------------------------------------------------------------------


def inductor_grpo(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; what ``torch.compile(fn, backend="inductor_grpo")`` calls.

    Raises ``ValueError`` for a bad ``grpo.`` option, what Inductor raises for a bad option of its own, and
    :class:`RequireError` under ``grpo.require``; ``torch.compile`` wraps all of them in ``BackendCompilerFailed``.
    """
    settings, patches = _resolve(mode, options)
    frame = generalise.before(gm, patches) if settings.generalise and _can_rewrite() else None
    return _compile(gm, generalise.arguments(frame, example_inputs), settings, patches, frame=frame)


def _resolve(mode: str | None = None, options: Mapping[str, Any] | None = None) -> tuple[Settings, dict[str, Any]]:
    ours, theirs = config.split_options(options)
    return config.current().with_options(ours), hooks.resolve_options(mode, theirs)


inductor_grpo.reset = hooks.reset_cudagraphs  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _recalled(beginning: Beginning) -> tuple[Any, Step | None]:
    """What an earlier process found out about the frame that is about to be traced for us."""
    settings, patches = _resolve(**beginning.options)
    folder = hooks.cache_folder(patches)
    if folder is None or not settings.generalise or not _can_rewrite():
        return None, None
    return generalise.recalled(beginning, patches, folder, (RewritePass(settings).uuid(), sorted(patches.items())))


generalise.watch(inductor_grpo, _recalled)


def _compile(
    gm: Any,
    example_inputs: Sequence[Any],
    settings: Settings,
    patches: dict[str, Any],
    call: Callable[..., Any] | None = None,
    frame: Frame | None = None,
    **keywords: Any,
) -> Any:
    settings = dataclasses.replace(settings, codegen=requested_codegen(settings.codegen))
    eager = settings.codegen == "eager"
    keywords["graph_cache_only"] = hooks.has_symbolic_floats(gm) and not generalise.watches_floats(frame)
    if not _can_rewrite():
        return hooks.compile_fx(gm, example_inputs, patches, eager, call, **keywords)
    graph_pass = RewritePass(settings)
    folder = None if eager else hooks.cache_folder(patches)
    key = hooks.graph_key(gm, example_inputs, sorted(patches.items()), graph_pass.uuid()) if folder else None
    stored = folder / key[:2] / f"{key}.json" if folder and key else None
    present = patches.get(hooks.HOOK, hooks.current_passes())
    patches = {**patches, hooks.HOOK: hooks.append_pass(present, graph_pass)}

    session = _Session(frame)
    session.graph_break = breaks.break_after(gm)
    watch = begin_compilation(gm)
    token = _session.set(session)
    abandoned = False
    try:
        compiled = hooks.compile_fx(gm, example_inputs, patches, eager, call, watch, **keywords)
        generalise.after(frame)
        if not session.called:  # Inductor's caches answered
            session.report = _load(stored)
        elif stored:
            files.write(stored, session.report.to_json())
        return compiled
    except Exception as error:
        abandoned = generalise.is_abandoned(error)
        raise
    finally:
        _session.reset(token)
        if abandoned:
            drop_compilation()
        else:
            _publish(session.report)


@functools.cache
def _can_rewrite() -> bool:
    lacking = hooks.missing()
    if lacking:
        log.warning("torch %s has no %s: inductor_grpo compiles with stock Inductor", torch.__version__, lacking)
    else:
        # A cached graph calls our operators and never runs the pass.
        from inductor_grpo import ops
        from inductor_grpo._compat import operator_calls
        from inductor_grpo.seam import ops as seam_ops

        for operator in ops.OPERATORS:
            operator_calls.install(operator)
        operator_calls.install(seam_ops.segments, seam_ops.run)
    return not lacking


# Plain backend="inductor" -----------------------------------------------------------------------------------

_enable_lock = threading.RLock()
_enabled: list[Mapping[str, Any]] = []
_installed: contextlib.ExitStack | None = None


def enable(options: Mapping[str, Any] | None = None) -> None:
    """From now on ``backend="inductor"`` rewrites too, in the whole process; :func:`disable` undoes one call.

    ``options`` are ``grpo.`` options over the settings; inside another ``enable`` they are laid over that one's.
    Functions that are compiled already stay as they are.
    """
    _push(options)


def disable() -> None:
    """Undoes the last :func:`enable`; nothing when there is none."""
    _pop()


@contextlib.contextmanager
def enabled(options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """:func:`enable` for the block; compilations that start inside it are rewritten."""
    _push(options)
    try:
        yield
    finally:
        _pop()


def _push(options: Mapping[str, Any] | None) -> None:
    global _installed
    with _enable_lock:
        merged = {**(_enabled[-1] if _enabled else {}), **(options or {})}
        config.current().with_options(merged)  # a bad option is an error here, not at the first compilation
        if not _enabled and _can_rewrite():
            _installed = contextlib.ExitStack()
            _installed.enter_context(hooks.replaced_compile_fx(_reroute))
        _enabled.append(merged)


def _pop() -> None:
    global _installed
    with _enable_lock:
        if _enabled:
            _enabled.pop()
        if not _enabled and _installed is not None:
            _installed.close()
            _installed = None


def _reroute(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(compile_fx)

    def compile_fx_with_pass(*args: Any, **kwargs: Any) -> Any:
        options = _enabled[-1] if _enabled else None
        # compile_fx calls itself, and our own backend calls it.
        if options is None or _suspended.get() or _session.get() is not None:
            return compile_fx(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        gm, example_inputs = (given.pop(name) for name in list(signature.parameters)[:2])
        patches = dict(given.pop("config_patches", None) or {})
        settings = config.current().with_options(options)
        return _compile(gm, example_inputs, settings, patches, compile_fx, **given)

    return compile_fx_with_pass


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """For the block, this thread compiles without the pass: for compilations that the package itself starts."""
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


# Reports ----------------------------------------------------------------------------------------------------


def last_report() -> Report | None:
    """The report of the last graph that finished compiling in this process; None before the first."""
    return _last_report


@contextlib.contextmanager
def collected() -> Iterator[list[Report]]:
    """``with collected() as reports``: the reports of the graphs that this thread compiles in the block, in order."""
    reports: list[Report] = []
    token = _collected.set(reports)
    try:
        yield reports
    finally:
        _collected.reset(token)


def _publish(report: Report) -> None:
    global _last_report
    end_compilation(report)
    if report.rewrites or report.obstacles:  # a graph's subgraphs without a head are not news
        report.rejections = report.obstacles
    _last_report = report
    reports = _collected.get()
    if reports is not None:
        reports.append(report)
    counters = hooks.counters()
    counters["rewrites"] += len(report.rewrites)
    counters["rejections"] += len(report.rejections)
    for rewrite in report.rewrites:
        counters[f"pattern:{rewrite.pattern}"] += 1
    for rejection in report.rejections:
        counters[f"rejected:{rejection.code}"] += 1
    log.info("%s", report.summary())
    log.debug("%s", report)
    hooks.trace_artifact("inductor_grpo_report", report.to_json)


def _load(path: Path | None) -> Report:
    """The stored report, or an empty one when there is none that can be read."""
    report = Report()
    if path is not None:
        try:
            report = Report.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            log.debug("no report is stored at %s", path, exc_info=True)
    report.from_cache = True
    return report
