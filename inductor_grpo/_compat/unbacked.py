"""What makes a trace with unbacked sizes possible or cheaper, and changes nothing in what it finds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sympy.tensor.tensor  # noqa: F401  the first sum of two symbols imports it, which would be in the first call
import torch
import torch._dynamo.config
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

Decomposition = Callable[..., Any]


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """For the block, decompositions that ask for the value of a size on which none of their results depends do without
    for tensors with unbacked sizes; others see no difference."""
    undo = contextlib.ExitStack()
    with undo:
        for table in _tables():
            for op, make in _REPLACEMENTS.items():
                original = table.get(op)
                if original is not None:
                    table[op] = make(original)
                    undo.callback(table.__setitem__, op, original)
        yield


def without_fake_cache() -> contextlib.AbstractContextManager[Any]:
    """Traces that begin in the block compute each fake tensor anew, until :func:`use_fake_cache`.

    The cache of fake tensors makes each result a second time before it keeps it, and most operations of a loss occur
    once in Dynamo's trace: with symbolic sizes that costs more than it ever saves.  Later traces repeat more.
    """
    if not hasattr(torch._dynamo.config, "fake_tensor_cache_enabled"):
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    return patch


def use_fake_cache(fake_mode: Any) -> None:
    """From here on that mode has its cache, unless Dynamo's settings are without."""
    if hasattr(fake_mode, "cache_enabled"):
        wanted = torch._dynamo.config.fake_tensor_cache_enabled
        fake_mode.cache_enabled = wanted and not getattr(fake_mode, "export", False)


def _tables() -> list[dict[Any, Decomposition]]:
    from torch._decomp import decomposition_table
    from torch._inductor import decomposition

    tables: list[dict[Any, Decomposition]] = [decomposition_table, decomposition.decompositions]
    with contextlib.suppress(AttributeError):
        tables.append(decomposition.fast_random_decomps())
    return list({id(table): table for table in tables}.values())


def _logsumexp(original: Decomposition) -> Decomposition:
    """The reference asks whether the tensor is empty; only an empty dimension that is reduced would make it differ."""

    def logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
        dims = tuple(dim) if isinstance(dim, Iterable) else (dim,)
        reduced = [x.shape[d] for d in (dims or range(x.dim()))] if x.dim() else []
        known = all(statically_known_true(size > 0) for size in reduced)
        if not free_unbacked_symbols(x) or not known or not x.is_floating_point():
            return original(x, dim, keepdim)
        largest = torch.amax(x, dims, keepdim=True)
        largest = torch.where(largest.abs() == float("inf"), 0, largest)
        result = (x - largest).exp().sum(dims, keepdim).log()
        return result + (largest if keepdim else largest.squeeze(dims))

    return logsumexp


_REPLACEMENTS: dict[Any, Callable[[Decomposition], Decomposition]] = {torch.ops.aten.logsumexp.default: _logsumexp}
