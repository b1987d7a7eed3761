"""Where the cases register themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; ``build() -> (function, args, kwargs, note)``, plain eager PyTorch.

    raises         exception types that eager raises, or None
    nonfinite      eager's output or a gradient holds inf or nan
    must_not_fuse  looks like the target and is not it
    own_backward   the function takes gradients itself
    device         "meta": shapes only
    """

    id: str
    description: str
    source: str
    build: Callable[[], tuple[Any, ...]]
    group: str = "numerics"
    raises: type[BaseException] | tuple[type[BaseException], ...] | None = None
    nonfinite: bool = False
    must_not_fuse: bool = False
    own_backward: bool = False
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Several calls of one function; ``build() -> (function, [(args, kwargs), ...], note)``."""

    id: str
    description: str
    source: str
    build: Callable[[], tuple[Any, ...]]
    group: str = "recompile"


CASES: dict[str, Case] = {}
SEQUENCES: dict[str, Sequence] = {}


def case(id: str, description: str, source: str, **flags: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers the decorated builder as the case ``id``."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        assert id not in CASES, id
        CASES[id] = Case(id, description, source, build, **flags)
        return build

    return register


def sequence(id: str, description: str, source: str, **flags: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers the decorated builder as the sequence ``id``."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        assert id not in SEQUENCES, id
        SEQUENCES[id] = Sequence(id, description, source, build, **flags)
        return build

    return register
