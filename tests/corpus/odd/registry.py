"""Where the cases register themselves, and what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.corpus.spellings import ids, normal, pick

Make = Callable[[], Any]
N, H, V = 13, 16, 41


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of ``function(*make())``.

    outcome    what the report of its graphs says: "streamed" where something was rewritten, then the codes of all
               rejections in order of the alphabet; "nothing" where there is neither
    raises     eager raises, and so must we
    silent     ... but for torch.compile as such, which lets it pass
    whole      the sizes of the case do not tell a vocabulary-sized leftover from other tensors
    dynamic    passed to torch.compile
    known      why the case fails today; it is expected to
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    outcome: str
    raises: bool = False
    silent: bool = False
    whole: bool = False
    dynamic: bool = False
    known: str = ""


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Calls of one compiled function with the arguments of each ``make``; ``outcome`` of all its graphs together."""

    name: str
    function: Callable[..., Any]
    makes: tuple[Callable[[], tuple[Any, ...]], ...]
    outcome: str
    automatic: str = ""  # the outcome where shapes become dynamic on their own, if another


CASES: dict[str, Case] = {}
SEQUENCES: dict[str, Sequence] = {}


def head(
    n: int = N,
    h: int = H,
    v: int = V,
    *more: Make,
    batch: int | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
) -> Callable[[], tuple[Any, ...]]:
    """Makes hidden [n,h] or [batch,n,h], weight [v,h], labels [n] or [batch,n], and ``more``."""
    lead = (n,) if batch is None else (batch, n)

    def make() -> tuple[Any, ...]:
        return (
            normal(*lead, h, seed=1, grad=grad, dtype=dtype),
            normal(v, h, seed=2, scale=0.4, grad=grad, dtype=dtype),
            ids(*lead, high=v),
            *(one() for one in more),
        )

    return make


def also(*more: Make, **flags: Any) -> Callable[[], tuple[Any, ...]]:
    """:func:`head` of the usual sizes with further arguments."""
    return head(flags.pop("n", N), H, flags.pop("v", V), *more, **flags)


def labelled(labels: Make, *more: Make) -> Callable[[], tuple[Any, ...]]:
    """:func:`head` with other labels."""
    return lambda: (*head()()[:2], labels(), *(one() for one in more))


def spoilt(value: int) -> Make:
    """Labels of which one is ``value``."""
    return lambda: ids(N).index_fill(0, torch.tensor([2]), value)


def register(outcome: str, name: str, function: Callable[..., Any], make: Make = head(), **flags: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, function, make, outcome, **flags)


def case(outcome: str, make: Make = head(), **flags: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function under its name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        register(outcome, function.__name__, function, make, **flags)
        return function

    return decorate


def sequence(outcome: str, *makes: Make, automatic: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        assert function.__name__ not in SEQUENCES, function.__name__
        SEQUENCES[function.__name__] = Sequence(function.__name__, function, makes, outcome, automatic)
        return function

    return decorate


def log_prob(z: Tensor, y: Tensor) -> Tensor:
    """[..., V], [...] -> [...]."""
    return pick(z.log_softmax(-1), y)


def entropy(z: Tensor) -> Tensor:
    """[..., V] -> [...]."""
    log_probs = z.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)
