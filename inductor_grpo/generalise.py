"""One compilation for every number of tokens and segments, every divisor and every scale.

Dynamo's first trace of a frame burns in the sizes, ints and floats of the first call.  Where its graph holds a head or
a seam, the frame is traced once more with those inputs symbolic that a training loop changes at each step:

- token dimensions of tensors (:mod:`inductor_grpo.tokens` tells them from features and vocabularies), unbacked: with
  no value to branch on, 0 and 1 are sizes like others and no guard depends on them;
- ints that are counts or factors, unbacked too;
- floats that only scale tensors, as symbols that Dynamo turns into tensors.  A float that is a bound of ``clamp``
  cannot become one and costs a compilation per value, as in stock.

Dynamo builds its guards from the last trace alone, and equations between unbacked sizes become guards like the others,
so a call that does not fit compiles again instead of failing.  Where the trace cannot do without a value (``if
num_segments == 0``), the frame is traced with backed symbols, which is stock's behaviour from its second compilation
on; where that fails too, as stock would have done at once.

What a second trace was made with is kept for the next process, which begins with that trace
(:mod:`inductor_grpo.recall`); where it does not do, the frame is traced as if nothing had been kept.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from inductor_grpo.report import Report

log = logging.getLogger("inductor_grpo")

try:
    from inductor_grpo import recall, tokens
    from inductor_grpo._compat import first_trace, frames, hooks, retrace, size_arguments
    from inductor_grpo._compat.frames import Broken, Frame, Input
    from inductor_grpo._compat.retrace import Marks, Step

    _lacking = None
except (ImportError, AttributeError, TypeError) as error:  # what they hold on to is private
    _lacking = str(error)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One trace of the frame: its kind of symbols, and where the first trace ended.

    ``choice`` is what the next process can begin with if this trace does; ``recalled`` where this one began so.
    """

    name: str
    end: tuple[Any, ...]
    marks: Marks
    watched: bool = True
    choice: recall.Choice | None = None
    recalled: recall.Place | None = None

    def __str__(self) -> str:
        return self.name


def watch(backend: Callable[..., Any], choose: Callable[[first_trace.Beginning], tuple[Any, Step | None]]) -> None:
    """Has ``choose``, which is to call :func:`recalled`, asked before the first trace of each frame of ``backend``."""
    if not _can_retrace():
        return
    try:
        first_trace.watch(backend, choose)
    except Exception:  # a surprise in what is private
        log.debug("every process looks for itself", exc_info=True)


def recalled(
    beginning: first_trace.Beginning, patches: Mapping[str, Any], folder: Path, parts: Iterable[object]
) -> tuple[recall.Place | None, Step | None]:
    """Before the first trace of a frame: where its marks are kept, and a trace with them if there are any."""
    if frames.static() or _captures_graphs(patches):
        return None, None
    place = recall.place(beginning, folder, parts)
    found = recall.load(place, beginning)
    if found is None:
        return place, None
    marks, end = found
    return place, _step(Phase("unbacked", end, marks, recalled=place))


def before(gm: Any, patches: Mapping[str, Any]) -> Frame | None:
    """Called with each graph before it compiles; the frame whose graph it is, None when nothing is to be done.

    Does not return when the frame has to be traced again: then it raises what Dynamo waits for.
    """
    if not _can_retrace():
        return None
    frame = frames.current(gm)
    if frame is None:
        return None
    retrace.release(frame)
    try:
        step = _first(frame, patches) if frame.state is None else _next(frame)
    except Exception:  # a surprise in what is private: what stock does
        log.debug("the frame keeps its shapes", exc_info=True)
        return None
    if step is not None:
        retrace.restart(frame, step)
    return frame


def arguments(frame: Frame | None, example_inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs with which the graph is to be compiled: the sizes that it takes again and again are taken once."""
    if frame is None or frame.state is None or frame.state.name != "unbacked":
        return example_inputs
    try:
        return size_arguments.drop_repeated(frame.output.graph, frame.gm, example_inputs)
    except Exception:  # a surprise in what is private
        log.debug("sizes stay arguments", exc_info=True)
        return example_inputs


def after(frame: Frame | None) -> None:
    """Called when the graph has compiled: what the compilation assumed about unbacked sizes become guards."""
    if frame is None or frame.state is None or frame.state.name != "unbacked":
        return
    phase: Phase = frame.state
    broken = frame.settle()
    if broken is not None:
        retrace.restart(frame, _without(phase, broken))
    if phase.choice is not None:
        try:
            recall.store(frame, phase.choice)
        except Exception:  # a surprise in what is private
            log.debug("the next process looks for itself", exc_info=True)


def is_abandoned(error: Exception) -> bool:
    """Whether the compilation that failed with ``error`` was an attempt, after which the frame is traced again."""
    return _can_retrace() and retrace.leads_to_another_trace(error)


def watches_floats(frame: Frame | None) -> bool:
    """Whether :func:`check_floats` sees to it that no stored graph depends on the value of a float."""
    return frame is not None and (frame.state is None or frame.state.watched)


def check_floats(frame: Frame, decisions: tuple[int, frozenset[str]]) -> None:
    """Called by the pass in the joint graph: no float that is an input may have become a number on the way there.

    A stored entry of the autograd cache has no guards on floats; such a float is a constant from the start instead.
    ``decisions`` is :meth:`Frame.decisions` from before the compilation.
    """
    floats = frame.floats_decided_since(decisions)
    if floats:
        _give_up_recalled(frame, "the value of a float decides something")
        phase = frame.state or Phase("as stock", frame.end, Marks())
        marks = dataclasses.replace(phase.marks, constants=phase.marks.constants | floats)
        watched = marks != phase.marks  # once is enough; otherwise that cache has to stay off
        log.debug("the values of %s decide something: they become constants", ", ".join(sorted(floats)))
        retrace.restart(frame, _step(dataclasses.replace(phase, marks=marks, watched=watched, choice=None)))


_DEPENDS_ON_SIZES = ("NO_ROW_RULE", "LAYOUT", "INTERNAL", "TOO_SMALL", "UNPROFITABLE")


def check_report(frame: Frame | None, report: Report, cut_up: bool) -> None:
    """Called by the pass with what it did: a head that only sizes without a value keep from being streamed, or a loop
    over pieces (``cut_up``) that they keep from being seen as one, is more important than one compilation.  And whether
    a head is worth streaming can only be a condition of the compilation where sizes have values."""
    phase: Phase | None = frame.state if frame is not None else None
    if frame is None or phase is None or phase.name == "as stock":
        return
    kept = [r for r in report.rejections if r.code in _DEPENDS_ON_SIZES]
    if kept or cut_up:
        _give_up_recalled(frame, "a head is left alone")
        log.debug("%s symbols leave a head alone (%s)", phase, kept[0].code if kept else "in pieces")
        stock = Phase("as stock", phase.end, Marks(forgotten=phase.marks.floats, codes=phase.marks.codes))
        retrace.restart(frame, _step(stock))


def _can_retrace() -> bool:
    lacking = _lacking or retrace.missing()
    if lacking:
        log.debug("shapes are as in stock, torch %s lacks what it takes: %s", torch.__version__, lacking)
    return not lacking


# Steps ------------------------------------------------------------------------------------------------------


def _first(frame: Frame, patches: Mapping[str, Any]) -> Step | None:
    if frame.static or frame.has_generators or _captures_graphs(patches) or not tokens.holds_loss(frame.gm):
        return None
    marks = choose(frame)
    if marks == Marks(codes=marks.codes):
        return None
    return _step(Phase("unbacked", frame.end, marks, choice=recall.choice(frame, marks)))


def _next(frame: Frame) -> Step | None:
    phase: Phase = frame.state
    if phase.name == "as stock":
        return None
    if frame.end != phase.end:
        return _fallback(phase, "the graph breaks elsewhere")
    if phase.name == "unbacked":
        broken = frame.settle()
        if broken is not None:
            return _without(phase, broken)
    elif phase.name == "backed":
        burnt = frame.constant_ints(phase.marks.ints)
        if burnt and burnt != phase.marks.ints:  # the others may do without their values
            marks = dataclasses.replace(phase.marks, kind="unbacked", ints=phase.marks.ints - burnt)
            return _step(Phase("unbacked", phase.end, marks))
    return None


def _step(phase: Phase) -> Step:
    if phase.name == "as stock":
        return Step(phase, phase.marks)
    return Step(phase, phase.marks, lambda reason: _fallback(phase, reason))


def _fallback(phase: Phase, reason: str) -> Step:
    log.debug("%s symbols do not do: %s", phase, reason)
    if phase.recalled is not None:
        recall.forget(phase.recalled)
        return Step(None, Marks(forgotten=phase.marks.floats, codes=phase.marks.codes))
    if phase.name == "unbacked":
        return _step(Phase("backed", phase.end, dataclasses.replace(phase.marks, kind="backed")))
    return _step(Phase("as stock", phase.end, Marks(forgotten=phase.marks.floats, codes=phase.marks.codes)))


def _without(phase: Phase, broken: Broken) -> Step:
    """Once more, with the dimensions static that are broadcast in this call."""
    if phase.recalled is not None:
        return _fallback(phase, broken.reason)
    tensors = tuple(
        (name, tensor, dims - {dim for of, dim in broken.ones if of == name})
        for name, tensor, dims in phase.marks.tensors
    )
    if tensors == phase.marks.tensors:
        return _fallback(phase, broken.reason)
    return _step(dataclasses.replace(phase, marks=dataclasses.replace(phase.marks, tensors=tensors), choice=None))


def _give_up_recalled(frame: Frame, reason: str) -> None:
    """Does not return where the marks are those of an earlier process: they are no better than none."""
    phase: Phase | None = frame.state
    if phase is not None and phase.recalled is not None:
        retrace.restart(frame, _fallback(phase, reason))


def _captures_graphs(patches: Mapping[str, Any]) -> bool:
    """CUDA graphs are captured for sizes, not for symbols: there the shapes are as in stock."""
    return hooks.captures_graphs(patches)


# What becomes symbolic --------------------------------------------------------------------------------------


def choose(frame: Frame) -> Marks:
    """The marks for the second trace, from the graph of the first."""
    symbols = frame.float_symbols()
    roles = tokens.Roles(frame.gm)
    marked: list[tuple[str, torch.Tensor, frozenset[int]]] = []
    ints, floats, constants = set[str](), set[str](), set[str]()
    for given in frame.inputs():
        if isinstance(given.value, torch.Tensor):
            dims = _token_dims(given, roles)
            if dims:
                marked.append((given.name, given.value, dims))
        elif isinstance(given.value, int):
            # Dynamo takes an int without a value for a size, and guards that it is not negative.
            if (
                given.value >= 0
                and not given.of_module
                and ".size()" not in given.name
                and roles.is_count(given.value, given.node)
            ):
                ints.add(given.name)
        elif roles.is_factor(given.value, given.node):
            if given.node is None:
                floats.add(given.name)
        elif given.node is not None:
            constants.update(filter(None, [symbols.get(given.name)]))
    return Marks(
        "unbacked",
        tuple(marked),
        frozenset(ints),
        frozenset(floats),
        frozenset(constants),
        codes=frame.codes,
    )


def _token_dims(given: Input, roles: tokens.Roles) -> frozenset[int]:
    tensor = given.value
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or given.of_module or frames.is_marked(tensor):
        return frozenset()
    return roles.token_dims(given.node, tensor.dim())
