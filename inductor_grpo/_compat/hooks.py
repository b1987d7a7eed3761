"""Inductor's hooks: its options, its custom joint-graph passes, its entry point and its caches.

What a function needs is looked for by name, never by torch's version; :func:`missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.config
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch._logging import trace_structured

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as GraphPass
else:
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass as GraphPass
    except ImportError:
        GraphPass = object
try:
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver
except ImportError:
    GraphTransformObserver = None  # type: ignore[assignment,misc]
try:
    from torch._inductor import custom_graph_pass as _custom_graph_pass

    _TAKES_SEVERAL = hasattr(_custom_graph_pass, "get_custom_graph_passes")
except ImportError:
    _TAKES_SEVERAL = False

HOOK = "joint_custom_pre_pass"
"""The Inductor setting that holds the custom passes over the joint graph, before Inductor's own."""

CompileFx = Callable[..., Any]


@functools.cache
def missing() -> str | None:
    """What this torch lacks, as a phrase; None when everything is there."""
    if GraphPass is object:
        return "torch._inductor.custom_graph_pass.CustomGraphPass"
    if not hasattr(inductor_config, HOOK):
        return f"torch._inductor.config.{HOOK}"
    from torch._inductor import compile_fx as module

    parameters = inspect.signature(module.compile_fx).parameters
    return next(
        (f"compile_fx({name}=)" for name in ("inner_compile", "config_patches") if name not in parameters), None
    )


# Options ----------------------------------------------------------------------------------------------------


def resolve_options(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """``mode`` and ``options`` as ``torch.compile(backend="inductor")`` reads them, as patches of Inductor's config.

    Raises what ``backend="inductor"`` raises for names and values that Inductor does not know.
    """
    if not options and mode in (None, "default") and not _bisecting():
        return {}
    # ``dynamic=`` is not handed to backends that torch does not know; Dynamo's settings show it while a backend runs.
    dynamic: bool | None = None
    if not getattr(torch._dynamo.config, "assume_static_by_default", True):
        dynamic = True
    elif not getattr(torch._dynamo.config, "automatic_dynamic_shapes", True):
        dynamic = False
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)


def _bisecting() -> bool:
    try:
        from torch._inductor.compiler_bisector import CompilerBisector

        return bool(CompilerBisector.get_config_change("inductor"))
    except (ImportError, AttributeError):
        return False


def reset_cudagraphs() -> None:
    """What the stock backend does when ``torch._dynamo.reset()`` is called."""
    with contextlib.suppress(ImportError):
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


# Passes -----------------------------------------------------------------------------------------------------


class PassSequence(GraphPass):
    """Several passes as one, for a torch whose hook takes a single pass.

    ``uuid()`` is None, which turns Inductor's caches off as they would be, when one of the passes has none.
    """

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> Any | None:
        """One id for all the passes, or None."""
        uuids = [graph_pass.uuid() if isinstance(graph_pass, GraphPass) else None for graph_pass in self.passes]
        return tuple(uuids) if all(uuids) else None


def append_pass(present: Any, graph_pass: Any) -> Any:
    """The value for :data:`HOOK` that runs ``present`` (None, a pass or several) and then ``graph_pass``."""
    if not present:
        return graph_pass
    if isinstance(present, PassSequence):
        passes = present.passes
    else:
        passes = tuple(present) if isinstance(present, (list, tuple)) else (present,)
    return [*passes, graph_pass] if _TAKES_SEVERAL else PassSequence([*passes, graph_pass])


def current_passes() -> Any:
    """What :data:`HOOK` holds now."""
    return getattr(inductor_config, HOOK)


def run_observed(graph: torch.fx.Graph, name: str, run: Callable[[torch.fx.Graph], None]) -> None:
    """Runs ``run(graph)``; the compiler bisector and ``config.disabled_passes`` can switch it off by ``name``."""
    if GraphTransformObserver is None or graph.owning_module is None:
        run(graph)
    else:
        GraphTransformObserver(graph.owning_module, name, "joint_graph_passes").apply_graph_pass(run)


# Compiling --------------------------------------------------------------------------------------------------


def captures_graphs(patches: Mapping[str, Any] | None = None) -> bool:
    """Whether CUDA graphs will be captured, under ``patches`` or as configured now."""
    return bool((patches or {}).get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def recomputes_anything() -> bool:
    """Whether the partitioner may run any operation again in the backward, not just those that are cheap."""
    config = torch._functorch.config
    return getattr(config, "activation_memory_budget", 1.0) < 1 or getattr(config, "aggressive_recomputation", False)


def compile_fx(
    gm: Any,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    eager: bool,
    call: CompileFx | None = None,
    watch: Callable[[CompileFx], CompileFx] | None = None,
    graph_cache_only: bool = False,
    **kw: Any,
) -> Any:
    """Inductor's ``compile_fx`` under ``patches`` of its config.

    ``eager``: torch.fx runs the graphs, no code; ``watch`` wraps what compiles the partitioned graphs.

    ``graph_cache_only``: AOTAutograd's cache is off, Inductor's own graph cache stays.  With symbolic floats a hit of
    the former loses the guard of a float specialised on the way (torch.clamp(x, 1 - eps, 1 + eps)), and eps stays at
    the cached value; so either this, or see to it that no such entry is stored.
    """
    from torch._inductor import compile_fx as module

    call = call or module.compile_fx
    if eager:
        kw["inner_compile"] = _run_by_fx
    if watch is not None:
        kw["inner_compile"] = watch(kw.get("inner_compile", module.compile_fx_inner))
    with contextlib.ExitStack() as stack:
        if eager or graph_cache_only:  # what runs by fx cannot be stored
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        return call(gm, example_inputs, config_patches=patches, **kw)


def has_symbolic_floats(gm: Any) -> bool:
    """Whether Dynamo made a Python float of the user's code symbolic in this graph."""
    if not isinstance(gm, torch.fx.GraphModule):
        return False
    return any(
        isinstance(value, torch.SymFloat)
        for node in gm.graph.nodes
        for value in (node.meta.get("example_value"), node.meta.get("val"))
    )


def _run_by_fx(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """An ``inner_compile`` that keeps the graph; boxed, so that arguments are freed once used."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def replaced_compile_fx(make: Callable[[CompileFx], CompileFx]) -> Iterator[None]:
    """For the block, every ``backend="inductor"`` compilation goes through ``make(compile_fx)``.

    The stock backend looks ``compile_fx`` up when it is called, so this reaches frameworks that name the backend.
    """
    from torch._inductor import compile_fx as module

    original = module.compile_fx
    replacement = functools.wraps(original)(make(original))
    module.compile_fx = replacement
    try:
        yield
    finally:
        if module.compile_fx is replacement:  # otherwise somebody wrapped it again: theirs to undo
            module.compile_fx = original


# Caches -----------------------------------------------------------------------------------------------------


def cache_folder(patches: dict[str, Any]) -> Path | None:
    """A folder of ours beside Inductor's graph cache; None when that cache is off under ``patches``."""

    def setting(name: str) -> Any:
        return patches.get(name, getattr(inductor_config, name, None))

    if setting("force_disable_caches") or not (setting("fx_graph_cache") or setting("fx_graph_remote_cache")):
        return None
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir()) / "inductor_grpo"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def graph_key(gm: Any, example_inputs: Sequence[Any], *parts: object) -> str | None:
    """A hash of what decides a compilation: the graph, its inputs, the modes it runs in, and ``parts``.

    Equal in every process that compiles the same code; None when ``gm`` is not a graph.
    """
    if not isinstance(gm, torch.fx.GraphModule):
        return None
    text = [repr(part) for part in parts]
    text += [torch.__version__, *modes()]
    known = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    if len(known) != len(example_inputs) or any(value is None for value in known):
        text += [_describe(value) for value in example_inputs]  # else the sizes of this call, which others share
    for _, module in gm.named_modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        text.append(str(module.graph))
        text += [_describe(node.meta.get("example_value")) for node in module.graph.nodes if node.op == "placeholder"]
    return hash_of(text)


def modes() -> list[str]:
    """The modes that decide what a graph does with the same operations."""
    text = [repr(torch.is_grad_enabled()), repr(torch.is_inference_mode_enabled())]
    text += [repr(torch.is_autocast_enabled(device)) for device in ("cpu", "cuda")]
    return text + [repr(torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]


def hash_of(text: Sequence[str]) -> str:
    """A hash of ``text`` without the addresses in it."""
    return hashlib.sha256(_ADDRESS.sub("", "\n".join(text)).encode()).hexdigest()


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    with contextlib.suppress(RuntimeError, NotImplementedError):  # no strides: sparse, nested
        layout = f"{tuple(map(str, value.shape))} {tuple(map(str, value.stride()))}"
        return f"{value.dtype} {value.device} {layout} {value.requires_grad}"
    return f"{type(value).__name__} {value.dtype} {value.device}"


def environment(prefix: str) -> tuple[tuple[str, str], ...]:
    """The environment variables that start with ``prefix``, sorted."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefix)))


# Showing ----------------------------------------------------------------------------------------------------


def counters() -> Counter[str]:
    """``torch._dynamo.utils.counters["inductor_grpo"]``."""
    return torch._dynamo.utils.counters["inductor_grpo"]


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "json") -> None:
    """Puts ``payload()`` into the structured trace (TORCH_TRACE, shown by tlparse) when one is written."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
