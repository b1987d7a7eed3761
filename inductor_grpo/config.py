"""Settings: where they come from, what they may be.

Three places, the nearest one wins:

1. ``torch.compile(fn, backend="inductor_grpo", options={"grpo.chunk_bytes": 1 << 26})`` for one compilation;
2. ``inductor_grpo.config.chunk_bytes = 1 << 26`` (or ``with config.patch(chunk_bytes=...)``) for the process;
3. the environment: ``INDUCTOR_GRPO_CHUNK_BYTES=67108864``.

====================  ===============================================================================
name                  meaning
====================  ===============================================================================
``min_logits_bytes``  leave heads with smaller logits alone; 0 rewrites every head; None: by device
``chunk_bytes``       upper bound for one chunk of logits; None (or 0): by device
``schedule``          "auto", or "two-pass": never compute gradients in the forward
``keep_bytes``        logits of a region that two passes may keep instead of computing them again
``accumulate``        "float32", or "param": sum weight gradients in the weight's own dtype
``require``           a vocabulary-sized tensor left in the graph is an error
``disable``           names of patterns not to use ("tiles": none of them), separated by commas
``max_rewrites``      stop after so many rewrites in one graph (bisecting); None: no limit
``generalise``        compile a loss once for all token counts, segment counts and factors; False: the
                      dynamic shapes of stock
``filter_eps``        leave columns of dlogits out of dX and dW whose elements are all below this share of the
                      largest in their row, such as 2**-12; 0: none (:mod:`inductor_grpo.filter`)
``row_kernel``        "on": chunk bodies run as one Triton program a row where they fit; "auto": on CUDA, where that
                      was measured to be faster; "off"
``codegen``           "inductor", or "eager": run the rewritten graphs without generating code
====================  ===============================================================================

The environment variables are INDUCTOR_GRPO_MIN_LOGITS_BYTES and so on.  A value of the wrong kind raises ``ValueError``
where it is set (for the environment: where it is read), a name that does not exist ``AttributeError``.
``del config.chunk_bytes`` takes a setting back to the environment or the default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OPTION_PREFIX = "grpo."
ENV_PREFIX = "INDUCTOR_GRPO_"


def _size(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError("must not be negative")
    return number


def _optional_size(value: Any) -> int | None:
    return None if value is None or _is_word(value, "none", "") else _size(value)


def _chunk(value: Any) -> int | None:
    return _optional_size(value) or None  # 0 and None both ask for the device's default


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("must be a whole number, not a bool")
    try:
        return int(value.strip()) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise ValueError("must be a whole number") from None


def _share(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError("must be a number") from None
    if isinstance(value, bool) or not 0 <= number < 1:
        raise ValueError("must be a number from 0 to 1, 1 excluded")
    return number


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if _is_word(value, "1", "true", "yes", "on"):
        return True
    if _is_word(value, "0", "false", "no", "off", ""):
        return False
    raise ValueError("must be True or False")


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of names, or one string with commas between them")
    return tuple(sorted({name for name in value if name}))  # sorted: the order must not change a cache key


def _patterns(value: Any) -> tuple[str, ...]:
    from .pattern import all_patterns  # they import what imports this module

    names, known = _names(value), {*all_patterns(), "tiles", "engine", "segment_sums"}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"must name patterns, of which there are {', '.join(sorted(known))}")
    return names


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError("must be one of " + ", ".join(map(repr, words)))
        return str(value)

    return parse


def _is_word(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value.strip().lower() in words


@dataclasses.dataclass(frozen=True)
class Settings:
    """One consistent set of settings; the pass sees nothing else.  Hashable, picklable, compared by value."""

    min_logits_bytes: int | None = None
    chunk_bytes: int | None = None
    schedule: str = "auto"
    keep_bytes: int = 0
    accumulate: str = "float32"
    require: bool = False
    disable: tuple[str, ...] = ()
    max_rewrites: int | None = None
    filter_eps: float = 0.0
    row_kernel: str = "auto"
    codegen: str = "inductor"
    generalise: bool = True

    def with_options(self, options: Mapping[str, Any]) -> Settings:
        """These settings with ``{"grpo.<name>": value}`` laid over them.

        Raises ``ValueError`` for an unknown ``grpo.`` key (naming the valid ones) or a value of the wrong kind.
        """
        changes = {}
        for key, value in options.items():
            name = key.removeprefix(OPTION_PREFIX)
            if not key.startswith(OPTION_PREFIX) or name not in _PARSERS:
                valid = ", ".join(OPTION_PREFIX + n for n in _PARSERS)
                raise ValueError(f"unknown option {key!r}; the options of inductor_grpo are {valid}")
            changes[name] = _parse(name, value, f"option {key!r}")
        return dataclasses.replace(self, **changes)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "min_logits_bytes": _optional_size,
    "chunk_bytes": _chunk,
    "schedule": _one_of("auto", "one-pass", "two-pass"),
    "keep_bytes": _size,
    "accumulate": _one_of("float32", "param"),
    "require": _switch,
    "disable": _patterns,
    "max_rewrites": _optional_size,
    "filter_eps": _share,
    "row_kernel": _one_of("auto", "on", "off"),
    "codegen": _one_of("inductor", "eager"),
    "generalise": _switch,
}
_DEFAULTS = Settings()
_overrides: dict[str, Any] = {}

# The type checker's view of the module's attributes; the values come from _ConfigModule.
min_logits_bytes: int | None
chunk_bytes: int | None
schedule: str
keep_bytes: int
accumulate: str
require: bool
disable: tuple[str, ...]
max_rewrites: int | None
filter_eps: float
row_kernel: str
codegen: str
generalise: bool


def _parse(name: str, value: Any, origin: str) -> Any:
    try:
        return _PARSERS[name](value)
    except ValueError as error:
        raise ValueError(f"{origin} {error}, got {value!r}") from None


def _value(name: str) -> Any:
    if name in _overrides:
        return _overrides[name]
    variable = ENV_PREFIX + name.upper()
    if variable in os.environ:
        return _parse(name, os.environ[variable], f"environment variable {variable}")
    return getattr(_DEFAULTS, name)


def current() -> Settings:
    """The settings in force now, from this module and the environment."""
    return Settings(**{name: _value(name) for name in _PARSERS})


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """``options`` of ``torch.compile`` as (ours, Inductor's).

    Raises ``ValueError`` for one of ours that lacks its prefix."""
    if bare := [key for key in options or () if key in _PARSERS]:
        raise ValueError(f"unknown option {bare[0]!r}; did you mean {OPTION_PREFIX + bare[0]!r}?")
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in (options or {}).items():
        (ours if key.startswith(OPTION_PREFIX) else theirs)[key] = value
    return ours, theirs


@contextlib.contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """``with config.patch(chunk_bytes=1 << 20): ...``: settings for the block, in the whole process."""
    parsed = {name: _check(name, value) for name, value in changes.items()}
    before = dict(_overrides)
    _overrides.update(parsed)
    try:
        yield
    finally:
        for name in parsed:
            if name in before:
                _overrides[name] = before[name]
            else:
                _overrides.pop(name, None)


def _check(name: str, value: Any) -> Any:
    if name not in _PARSERS:
        raise AttributeError(f"inductor_grpo.config has no setting {name!r}; it has {', '.join(_PARSERS)}")
    return _parse(name, value, f"inductor_grpo.config.{name}")


class _ConfigModule(types.ModuleType):
    """Makes ``config.name = value`` check and store, and ``del config.name`` go back to the default."""

    def __getattr__(self, name: str) -> Any:
        if name not in _PARSERS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _value(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # the import system's own
            super().__setattr__(name, value)
        else:
            _overrides[name] = _check(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _PARSERS:
            _overrides.pop(name, None)
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_PARSERS})


sys.modules[__name__].__class__ = _ConfigModule
