"""``explain(fn, *args, **kwargs)``: what the backend would do to a function, without compiling it for good."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from inductor_grpo import backend
from inductor_grpo.capture import capture
from inductor_grpo.report import Rejection, Report


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Traces ``fn(*args, **kwargs)``, runs the rewrite on every graph of it, and returns what was and was not done.

    ``fn`` is a function, a method, an ``nn.Module``, or what ``torch.compile`` made of one.  No code is generated.
    The function runs once, forward only: gradients are not touched, but its in-place changes and random draws happen.
    ``grpo.require`` is off here; the other settings apply.  What Dynamo knows about other functions stays as it is.
    """
    settings: dict[str, Any] = {"grpo.codegen": "eager", "grpo.require": False}
    compiled = torch.compile(fresh_copy(unwrapped(fn)), backend=backend.inductor_grpo, options=settings)
    with backend.collected() as reports, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        with capture() as captured:
            compiled(*args, **kwargs)
    merged = sum(reports, Report())
    if merged.rewrites or merged.obstacles:
        merged.rejections = merged.obstacles
    elif len(captured.graphs) > 1 and merged.rejections:
        merged.rejections = [_without_head(len(captured.graphs), merged.rejections)]
    return merged


def _without_head(graphs: int, rejections: list[Rejection]) -> Rejection:
    """One rejection for a function in several graphs, none of which has a head."""
    first = next((r for r in rejections if "graph break" in r.why), rejections[0])
    message = f"Dynamo made {graphs} graphs of this function, and {first.why}; {first.cure}"
    return Rejection(first.code, message, first.location, first.bytes, first.op)


def unwrapped(fn: Any) -> Any:
    """The user's function or module behind ``torch.compile``."""
    if isinstance(fn, torch._dynamo.OptimizedModule):
        return fn._orig_mod
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def fresh_copy(fn: Any) -> Callable[..., Any]:
    """``fn`` under a code object of its own: Dynamo keeps what it compiled, and its counts, with the code object."""
    if isinstance(fn, types.FunctionType):
        copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
        copy.__kwdefaults__ = fn.__kwdefaults__
        copy.__dict__.update(fn.__dict__)
        return copy

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
