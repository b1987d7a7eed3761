"""Private torch API for one purpose: trace a chunk body with a symbolic row count and compile it with Inductor.

What is used and why it may move between releases:

* ``ShapeEnv``, ``FakeTensorMode``, ``make_fx``: the public tracing entry points do not let a caller own the shape
  environment, and ours must not specialise sizes 0 and 1.
* ``torch._inductor.compile_fx.compile_fx_inner``: code generation without AOTAutograd; its FX graph cache makes a
  second process cheap.
* ``torch._guards.tracing``: the FX graph cache finds the shape environment through the tracing context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch

_own_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor argument of a traced function; ``None`` in ``shape`` stands for the symbolic row count."""

    shape: tuple[int | None, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Compiled:
    """A compiled function together with the guards under which it is right.

    Call it with one flat list: ``[rows, *symbols, *tensors]``.
    """

    def __init__(self, call: Callable[[list[Any]], Sequence[Any]], guards: Sequence[Any], symbols: Sequence[Any]):
        self._call = call
        self._guards = tuple(guards)
        self._symbols = tuple(symbols)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self._call(args)

    def holds(self, values: Sequence[int]) -> bool:
        """Whether every guard holds when the symbols (row count first) take ``values``."""
        env = {symbol: sympy.Integer(value) for symbol, value in zip(self._symbols, values, strict=True)}
        return all(bool(guard.xreplace(env)) for guard in self._guards)


def compile_lock() -> threading.RLock:
    """The lock that Dynamo holds while it compiles, or one of our own where that moved."""
    try:
        from torch._dynamo.convert_frame import compile_lock as lock
    except ImportError:
        return _own_lock
    return lock


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decomposition table for the current configuration."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Hides what the caller's thread may have set: dispatch and function modes, grad mode, inference mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


def plain_functions() -> contextlib.AbstractContextManager[Any]:
    """Hides function modes (a default device, say) from the calls inside."""
    return torch._C.DisableTorchFunction()


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """One is a view of the other's memory; also for fake tensors."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def capturing() -> bool:
    """Whether the current CUDA stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def has_mixed_addmm(device_type: str) -> bool:
    """Whether ``mm`` and ``addmm`` take bf16 or fp16 operands and write a float32 result on this device."""
    try:
        return all(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, device_type.upper())
            for name in ("aten::mm.dtype_out", "aten::addmm.dtype_out")
        )
    except (AttributeError, RuntimeError):
        return False


def trace(
    fn: Callable[..., Any], symbols: Sequence[tuple[str, int]], specs: Sequence[TensorSpec]
) -> tuple[torch.fx.GraphModule, list[Any], list[sympy.Symbol], Any]:
    """Traces ``fn(*symbols, *tensors)``.

    ``symbols`` are (name, hint) pairs, the row count first.
    Returns the graph, its fake inputs, the sympy symbols and the fake mode.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    names: list[sympy.Symbol] = []
    ints: list[Any] = []
    for position, (name, hint) in enumerate(symbols):
        source = ConstantSource(f"__inductor_grpo_{name}")
        symbol = env.create_symbol(
            hint,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None,
            positive=True if position == 0 else None,
            do_not_specialize_zero_one=True,
        )
        names.append(symbol)
        ints.append(env.create_symintnode(symbol, hint=hint, source=source))
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    rows = ints[0]
    with mode:
        fakes = [
            torch.empty_strided(
                [rows if size is None else size for size in spec.shape],
                spec.stride,
                dtype=spec.dtype,
                device=spec.device,
            )
            for spec in specs
        ]
        graph = make_fx(fn, decomposition_table=decompositions(), tracing_mode="real")(*ints, *fakes)
    return graph, [*ints, *fakes], names, mode


def _settings() -> dict[str, Any]:
    """Inductor settings that differ from the caller's while a body compiles; only those this torch has."""
    from torch._inductor import config

    settings: dict[str, Any] = {
        "triton.cudagraphs": False,  # the caller's graph capture, if any, holds our kernels
        "cpp_wrapper": False,
        "freezing": False,
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
    }
    if hasattr(config.triton, "prefer_nd_tiling"):
        # [n, V] kernels without a division by V for each element: a quarter less time on an H200, the same numbers.
        settings["triton.prefer_nd_tiling"] = True
    return settings


def compile_body(fn: Callable[..., Any], symbols: Sequence[tuple[str, int]], specs: Sequence[TensorSpec]) -> Compiled:
    """Traces and compiles ``fn``; the last statements of ``fn`` may be ``copy_`` into tensor arguments.

    Raises whatever tracing or code generation raises.
    """
    import torch._inductor.config as inductor_config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    with compile_lock(), clean_state(), inductor_config.patch(_settings()):
        with tracing(None):
            graph, inputs, names, mode = trace(fn, symbols, specs)
        with tracing(TracingContext(mode)):
            call = compile_fx_inner(graph, inputs, is_inference=True)
    guards = [guard.expr for guard in mode.shape_env.guards]
    return Compiled(call, guards, names)


def trace_body(
    fn: Callable[..., Any], symbols: Sequence[tuple[str, int]], specs: Sequence[TensorSpec]
) -> tuple[torch.fx.Graph, sympy.Symbol, Callable[[Sequence[int]], bool]]:
    """The graph of ``fn``, the symbol of its row count, and whether it is right when the symbols have given values."""
    from torch._guards import tracing

    with compile_lock(), clean_state(), tracing(None):
        graph, _, names, mode = trace(fn, symbols, specs)
    guards = [guard.expr for guard in mode.shape_env.guards]
    return graph.graph, names[0], Compiled(graph, guards, names).holds


def source_of(compiled: Compiled) -> str:
    """The generated code of a compiled body, for tests and diagnosis; empty where torch does not keep it."""
    return str(getattr(compiled._call, "source_code", "") or "")
