"""The moment before Dynamo's first trace of a frame.

A backend is called when a trace is over.  What an earlier process found out about the frame is of use before, so
Dynamo's ``trace_frame`` is ours from the import on.  It passes frames of other backends through as they are, and it
changes no more than :mod:`.retrace` does in a second trace: which inputs are symbols.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo import convert_frame
from torch._guards import CompileContext

from inductor_grpo._compat import retrace
from inductor_grpo._compat.frames import NOTE, STATE
from inductor_grpo._compat.retrace import Step

log = logging.getLogger("inductor_grpo")


@dataclasses.dataclass(eq=False)
class Beginning:
    """A frame that is about to be traced, and the arguments with which its backend will be called."""

    code: types.CodeType
    local: Mapping[str, Any]
    closure: tuple[types.CellType, ...] | None
    options: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """What the source of that name is in this call; raises ``LookupError`` for one that is no path from a local."""
        try:
            return _follow(ast.parse(name, mode="eval").body, self.local)
        except (SyntaxError, AttributeError, TypeError, ValueError, LookupError) as error:
            raise LookupError(name) from error


Choose = Callable[[Beginning], tuple[Any, Step | None]]


def watch(backend: Callable[..., Any], choose: Choose) -> None:
    """From now on ``choose`` is asked before the first trace of each frame that ``backend`` compiles.

    It gives a note, which the backend finds as :attr:`Frame.note`, and the marks of the first trace or None.  What it
    raises is logged, and the frame is traced as if it had not been asked.
    """
    original = convert_frame.trace_frame
    parameters = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def trace_frame(*args: Any, **kwargs: Any) -> Any:
        context = CompileContext.try_get()
        if context is None or hasattr(context, NOTE) or hasattr(context, STATE):  # not the first trace
            return original(*args, **kwargs)
        given = {**dict(zip(parameters, args)), **kwargs}
        options = options_of(given.get("compiler_fn"), backend)
        if options is None or given.get("export") or _decides_with_others(given):
            return original(*args, **kwargs)
        setattr(context, NOTE, None)
        step = None
        try:
            closure = given.get("closure") or None
            note, step = choose(Beginning(given["code"], given["locals"], closure, options))
            setattr(context, NOTE, note)
        except Exception:  # the backend will raise what is the user's
            log.debug("nothing is recalled", exc_info=True)
        if step is None:
            return original(*args, **kwargs)
        return retrace.begin(context, step)(*args, **kwargs)

    convert_frame.trace_frame = trace_frame


def options_of(compiler: Any, backend: Callable[..., Any]) -> dict[str, Any] | None:
    """The keywords with which ``compiler``, as Dynamo has it, calls ``backend``; None when it calls another one."""
    options: dict[str, Any] = {}
    for _ in range(8):
        if compiler is backend:
            return options
        if isinstance(compiler, functools.partial):
            options = {**compiler.keywords, **options}
            compiler = compiler.func if not compiler.args else None
        elif isinstance(compiler, torch._TorchCompileWrapper):
            options = {**compiler.kwargs, **options}
            compiler = compiler.compiler_fn
        else:
            compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return None


def _decides_with_others(given: Mapping[str, Any]) -> bool:
    """Whether ranks trace in step, or a package stores what Dynamo did: as many traces as without us, then."""
    return (
        given.get("distributed_state") is not None
        or given.get("package") is not None
        or bool(getattr(torch._dynamo.config, "enable_compiler_collectives", False))
    )


def _follow(node: ast.expr, local: Mapping[str, Any]) -> Any:
    """The value of ``L['x'].y[0]``: nothing is called that is not an attribute or an item."""
    if isinstance(node, ast.Name) and node.id == "L":
        return local
    if isinstance(node, ast.Attribute):
        return getattr(_follow(node.value, local), node.attr)
    if isinstance(node, ast.Subscript):
        return _follow(node.value, local)[ast.literal_eval(node.slice)]
    raise LookupError(ast.dump(node))
