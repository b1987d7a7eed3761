"""Where the variants register themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Variant:
    """One spelling of hidden -> logits -> loss.

    ``function(*factory(device, dtype, small))`` runs on CPU; the first two arguments are hidden and weight.
    kind     "logp", "ent", "logp+ent", "loss" (a scalar), "seq" (one value a sequence) or "neg" (a near miss)
    grad     hidden and weight require a gradient
    mutates  writes into the logits in place
    dynamic  data-dependent shapes or host syncs, which Dynamo does not keep in one graph by default
    """

    id: str
    kind: str
    function: Callable[..., Any]
    factory: Callable[..., tuple[Any, ...]]
    frameworks: tuple[str, ...]
    grad: bool = True
    mutates: bool = False
    dynamic: bool = False
    synthetic: bool = False
    returns: str | None = None


VARIANTS: dict[str, Variant] = {}


def variant(
    id: str, kind: str, frameworks: list[str], factory: Callable[..., tuple[Any, ...]], **flags: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the variant ``id``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        assert id not in VARIANTS, id
        VARIANTS[id] = Variant(id, kind, function, factory, tuple(frameworks), **flags)
        return function

    return register
