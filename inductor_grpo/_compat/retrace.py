"""Tracing a frame again with other inputs symbolic.

A backend is called inside the trace of a frame.  Dynamo traces a frame again when a ``RestartAnalysis`` reaches it, and
it builds its guards only after the last trace, from that trace alone.  So :func:`restart` changes which inputs are
symbols and never what is guarded.  A trace that fails under our marks is undone: the frame is traced again as the
caller says, in the end as stock would.

What a function needs is looked for by name; :func:`missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.compiler.config
from torch._dynamo import convert_frame, exc
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import CompileContext

from inductor_grpo._compat import known_floats, unbacked
from inductor_grpo._compat.frames import STATE, Frame

log = logging.getLogger("inductor_grpo")

_TENSOR_MARKS = {"backed": "_dynamo_weak_dynamic_indices", "unbacked": "_dynamo_unbacked_indices"}
_INT_MARKS = {"backed": "dynamic_sources", "unbacked": "unbacked_sources"}


class Retrace(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
    """Asks Dynamo to trace the frame again.

    Dynamo hands the first base through from backends, and keeps what it knows of floats; for the second one it forgets
    where the frame broke.
    """


@functools.cache
def missing() -> str | None:
    """What this torch lacks for tracing again, as a phrase; None when everything is there."""
    if not all(hasattr(torch.compiler.config, name) for name in _INT_MARKS.values()):
        return "torch.compiler.config.unbacked_sources"
    wanted = {"locals", "globals"}
    if not wanted <= set(inspect.signature(getattr(convert_frame, "trace_frame", len)).parameters):
        return "torch._dynamo.convert_frame.trace_frame"
    try:
        from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, get_code_state  # noqa: F401
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
    except ImportError as error:
        return str(error)
    if not hasattr(InstructionTranslator, "current_tx"):
        return "InstructionTranslator.current_tx"
    if not hasattr(ShapeEnv(), "deferred_runtime_asserts"):
        return "ShapeEnv.deferred_runtime_asserts"
    return None


@dataclasses.dataclass(frozen=True)
class Marks:
    """Which inputs the next trace makes symbolic: dimensions of tensors, and ints and floats by their source.

    ``kind`` "unbacked": their values decide nothing, 0 and 1 are values like others; "backed": they have guards.
    Floats are always backed.  ``constants`` are symbols of floats that the trace makes numbers again, ``forgotten`` the
    sources of floats that are as if they had never been marked.  ``codes`` are the functions whose floats they are
    (:attr:`Frame.codes`); ``unseen`` are floats of a function that Dynamo has not traced yet.
    """

    kind: str = "unbacked"
    tensors: tuple[tuple[str, torch.Tensor, frozenset[int]], ...] = ()
    ints: frozenset[str] = frozenset()
    floats: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    forgotten: frozenset[str] = frozenset()
    codes: frozenset[known_floats.Code] = frozenset()
    unseen: known_floats.Unseen = ()


Fallback = Callable[[str], "Step | None"]


@dataclasses.dataclass(frozen=True)
class Step:
    """The next trace: its marks, and what it finds in :attr:`Frame.state`.

    When it fails or never reaches the backend, ``fallback(reason)`` gives the step after it; without one a failure is
    the user's.
    """

    state: Any
    marks: Marks
    fallback: Fallback | None = None


class _Attempts:
    """The traces of one compilation."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.undo = contextlib.ExitStack()
        self.at_end = contextlib.ExitStack()
        self.reached = False


def begin(context: CompileContext, step: Step) -> Callable[..., Any]:
    """What takes the place of ``trace_frame`` in a compilation whose first trace has marks already."""
    _attempts(context, step)
    return convert_frame.trace_frame


def restart(frame: Frame, step: Step) -> None:
    """Has Dynamo trace the frame again.  Never returns: raises what Dynamo waits for."""
    _attempts(frame.context, step).step = step
    raise _retrace(step)


def _attempts(context: CompileContext, step: Step) -> _Attempts:
    attempts: _Attempts | None = getattr(context, STATE, None)
    if attempts is None:
        attempts = _Attempts(step)
        setattr(context, STATE, attempts)
        _install(context, attempts)
    return attempts


def release(frame: Frame) -> None:
    """Takes the marks off: the trace has used them, and guards and nested compilations must not see them."""
    attempts = getattr(frame.context, STATE, None)
    if attempts is not None:
        attempts.reached = True
        attempts.undo.close()
        unbacked.use_fake_cache(frame.output.fake_mode)


def leads_to_another_trace(error: Exception) -> bool:
    """Whether Dynamo, or a step's fallback, traces the frame again after ``error``."""
    attempts = getattr(CompileContext.try_get(), STATE, None)
    return isinstance(error, exc.RestartAnalysis) or (attempts is not None and attempts.step.fallback is not None)


def _retrace(step: Step) -> Retrace:
    return Retrace(restart_reason=f"inductor_grpo: {step.state or 'as if nothing were known'}")


def _install(context: CompileContext, attempts: _Attempts) -> None:
    """From here to the end of this compilation, our own ``trace_frame``.  Dynamo compiles one frame at a time."""
    original, compilation = convert_frame.trace_frame, weakref.ref(context)
    attempts.at_end.enter_context(unbacked.without_value_checks())
    TensorifyState.clear()  # it goes by the names of arguments: what other functions left there is not about this one
    attempts.at_end.callback(TensorifyState.clear)

    def end() -> None:
        attempts.at_end.close()
        if convert_frame.trace_frame is trace_frame:  # otherwise somebody wrapped it again: theirs to undo
            convert_frame.trace_frame = original

    @functools.wraps(original)
    def trace_frame(*args: Any, **kwargs: Any) -> Any:
        present = compilation()
        if present is None:  # it was cut short
            end()
        if present is None or CompileContext.try_get() is not present:  # another one runs inside it
            return original(*args, **kwargs)
        attempts.reached = False
        try:
            with attempts.undo:
                _apply(attempts.step.marks, attempts.undo)
                result = original(*args, **kwargs)
        except exc.RestartAnalysis:  # ours, or Dynamo's own reason to trace again: under the same marks
            raise
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            _fall(attempts, f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}", error)
            end()
            raise
        except BaseException:
            end()
            raise
        if not attempts.reached:
            _fall(attempts, "the trace left no graph", None)
        end()
        return result

    convert_frame.trace_frame = trace_frame


def _fall(attempts: _Attempts, reason: str, error: Exception | None) -> None:
    """Raises what leads to the step after the one that failed; returns when there is none."""
    following = attempts.step.fallback(reason) if attempts.step.fallback is not None else None
    if following is not None:
        log.debug("the frame is traced again after this", exc_info=error)
        attempts.step = following
        retrace = _retrace(following)
        retrace._torch_dynamo_tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)  # Dynamo frees it
        raise retrace from None


def _apply(marks: Marks, undo: contextlib.ExitStack) -> None:
    def mark(tensor: torch.Tensor, attribute: str, dims: Iterable[int]) -> None:
        if dims and not hasattr(tensor, attribute):
            setattr(tensor, attribute, set(dims))
            undo.callback(delattr, tensor, attribute)

    if marks.tensors or marks.ints:
        undo.enter_context(unbacked.without_fake_cache())
    attribute, setting = _TENSOR_MARKS[marks.kind], _INT_MARKS[marks.kind]
    for _, tensor, dims in marks.tensors:
        mark(tensor, attribute, dims)
        if tensor._base is not None:  # dynamic=True would make its size a symbol, with guards that nobody asked for
            mark(tensor._base, "_dynamo_static_indices", range(tensor._base.dim()))
    if marks.ints:
        present = getattr(torch.compiler.config, setting)
        patterns = [present, *(_pattern(name) for name in sorted(marks.ints))]
        changes = {setting: ",".join(filter(None, patterns))}
        undo.enter_context(torch.compiler.config.patch(changes))  # type: ignore[attr-defined]
    for symbol in marks.constants:
        TensorifyState.specialize(symbol)
    if marks.floats or marks.forgotten:
        known_floats.remember(marks.codes, marks.floats, marks.forgotten)
    if marks.unseen:
        known_floats.remember_unseen(marks.unseen)


def _pattern(name: str) -> str:
    """A regular expression for a source's name that holds none of what separates the names in the setting."""
    return "^" + re.sub(r"\\?[ ,:]", ".", re.escape(name)) + "$"
