"""What a case is, and the list of all of them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

Step = Callable[..., Any]
Made = tuple[Step, tuple[Any, ...]]
"""A step ``(hidden, weight, ...)`` that ends in a loss, and its arguments."""

MODULES = ("trl", "trl_older", "verl", "areal", "rlinf", "torchrl", "torchtune", "liger")
"""The modules beside this one that hold cases."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One function of a package, called as the package calls it.

    ``name``      unique, what the command line and the tests say
    ``package``   the distribution and the one version of it that the case is about
    ``needs``     the module that must be found; finding it imports nothing of the package
    ``function``  what of the package is called, in the order of the calls
    ``how``       inputs and settings that matter, in words
    ``make``      imports the package and returns the step and its arguments
    ``cure``      what to write where the package's code keeps the head from being rewritten, or breaks the graph
    """

    name: str
    package: str
    version: str
    needs: str
    function: str
    how: str
    make: Callable[[], Made]
    cure: str = ""

    @property
    def installed(self) -> bool:
        """Whether the package is here in the case's version."""
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return False
        return version == self.version and importlib.util.find_spec(self.needs) is not None


_CASES: dict[str, Case] = {}


def cases_of(
    package: str, version: str, needs: str | None = None, cuts: str = ""
) -> Callable[..., Callable[[Callable[[], Made]], Any]]:
    """A decorator for the cases of one package: ``@case("module.function", "[B, T, V]", cure="...")``.

    The case is called after the decorated function, which is its ``make``.  ``cuts`` is what to write where the package
    cuts the graph, for cases without a ``cure`` of their own.
    """

    def case(function: str, how: str, cure: str = "", name: str = "") -> Callable[[Callable[[], Made]], Any]:
        def register(make: Callable[[], Made]) -> Callable[[], Made]:
            key = f"{package}-{version}/{name or make.__name__}"
            assert key not in _CASES, key
            _CASES[key] = Case(key, package, version, needs or package, function, how, make, cure or cuts)
            return make

        return register

    return case


def with_scalar_outputs(step: Step) -> Step:
    """The step, to be compiled with ``torch._dynamo.config.capture_scalar_outputs``: ``.item()`` stays in the graph."""
    step.one_graph = True  # type: ignore[attr-defined]
    return step


def all_cases() -> dict[str, Case]:
    """Every case by name, whether its package is installed or not."""
    for module in MODULES:
        importlib.import_module(f"inductor_grpo.tools.peers.{module}")
    return dict(_CASES)
