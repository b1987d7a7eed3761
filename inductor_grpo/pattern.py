"""Patterns: known shapes of maths on logits, and the better way to run them.

A pattern is an acceleration: without it the engine streams the same region over chunks of rows, and tests hold the two
against each other.  It is written in the language of users.  Its ``spellings`` are plain functions of logits ``z``
``[n, V]`` that give one value a row ``[n, 1]``; each comes with a function of the online statistics
(:mod:`inductor_grpo.online`) that gives the same value.  They are traced, turned into a pattern of Inductor's matcher,
and looked for in the bodies of chunk programs, where every view and every dimension argument is already canonical;
numbers, dimensions and dtypes must be equal, nothing is a wildcard but z.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable

import torch
import torch.fx as fx
from torch import Tensor

from ._compat import matcher
from .capture import tried
from .report import Rejection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelling:
    """``value(z)`` as users (or torch's decompositions) write it, and ``online(m, s, t)`` from the statistics of z.

    m: maximum, s: sum of exponentials, t: their weighted sum, each ``[n, 1]``; see :mod:`inductor_grpo.online`.  A
    second parameter ``zero`` of ``value`` stands for the 0-dim constant 0."""

    value: Callable[..., Tensor]
    online: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearMiss:
    """A function ``(hidden, weight, labels)`` that looks like the pattern and is not; ``why`` in a sentence."""

    function: Callable[..., object]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """One pattern; a file in ``patterns/`` defines one as ``PATTERN``.

    ``examples``     naive functions ``(hidden, weight, labels)`` in the users' language that it must take
    ``near_misses``  look-alikes that it must leave to the engine
    ``spellings``    what it recognises in a chunk program
    ``weighted``     needs the weighted sum t
    ``guard``        a last word on a match: given z's node in the body, a Rejection or None
    ``hints``        what to change to be taken, for people
    """

    name: str
    summary: str
    examples: tuple[Callable[..., object], ...]
    near_misses: tuple[NearMiss, ...]
    spellings: tuple[Spelling, ...]
    weighted: bool = False
    guard: Callable[[fx.Node], Rejection | None] = lambda z: None
    hints: tuple[str, ...] = ()


@functools.cache
def all_patterns() -> dict[str, Pattern]:
    """Every pattern of the ``patterns`` package, by name; those that need less come first."""
    package = importlib.import_module(f"{__package__}.patterns")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    found = [m.PATTERN for m in modules if hasattr(m, "PATTERN")]
    return {p.name: p for p in sorted(found, key=lambda p: (p.weighted, p.name))}


def statistic(z: Tensor, pattern: str, spelling: int) -> Tensor:
    """Stands in a body for the value that a spelling recognised; never runs."""
    raise NotImplementedError("a marker of a recognised value is no function to call")


@functools.cache
def matcher_of(name: str) -> matcher.Matcher:
    """The pattern's spellings, registered with Inductor's pattern matcher."""
    pattern = all_patterns()[name]
    found = matcher.Matcher(f"inductor_grpo.{name}")
    for index, spelling in enumerate(pattern.spellings):

        def mark(graph: fx.Graph, z: fx.Node, root: fx.Node, index: int = index) -> None:
            with graph.inserting_before(root):
                marker = graph.call_function(statistic, (z, name, index))
            root.replace_all_uses_with(marker)

        def accept(z: fx.Node, zero: fx.Node | None = None) -> bool:
            return pattern.guard(z) is None and (zero is None or is_zero(zero))

        found.add(trace(spelling.value), accept, mark)
    return found


def recognise(name: str, body: fx.Graph) -> bool:
    """Marks what the pattern takes in a body; False when it takes nothing."""
    started = time.perf_counter()
    found = bool(matcher_of(name).apply(body))
    tried(name, found, time.perf_counter() - started)
    return found


def is_zero(node: fx.Node) -> bool:
    """A constant 0 in a body."""
    return node.target is torch.ops.aten.full.default and bool(node.args[1] == 0)


def trace(value: Callable[..., Tensor]) -> fx.GraphModule:
    """A spelling as a graph in the operations that chunk programs are made of."""
    constants = [torch.empty(()) for name in inspect.signature(value).parameters if name == "zero"]
    return matcher.trace(value, torch.empty(4, 11), *constants)
