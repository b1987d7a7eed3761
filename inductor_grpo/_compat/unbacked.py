"""Decompositions that ask for the value of a size where none of their results depends on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

Decomposition = Callable[..., Any]


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """For the block, such decompositions do without for tensors with unbacked sizes; others see no difference."""
    undo = contextlib.ExitStack()
    with undo:
        for table in _tables():
            for op, make in _REPLACEMENTS.items():
                original = table.get(op)
                if original is not None:
                    table[op] = make(original)
                    undo.callback(table.__setitem__, op, original)
        yield


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
