"""What a command looks at: ``module:function`` or ``script.py``, run with every compilation captured."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from inductor_grpo import backend, config
from inductor_grpo._compat import watching
from inductor_grpo.capture import Capture, capture
from inductor_grpo.explain import fresh_copy, unwrapped


class TargetError(Exception):
    """The target cannot be run as it was named; the message says what to write instead."""


@dataclasses.dataclass
class Outcome:
    """What was captured, and the exception that ended the target early."""

    capture: Capture
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """A target and how to run it.

    ``name``     ``script.py`` (anything that ends in ``.py``) or ``module:function``
    ``inputs``   for a function that takes arguments: a function of no arguments that returns them, ``module:function``
                 or the name of one in the same module
    ``arguments``  the command line of a script
    ``codegen``  "eager": nothing is generated, "inductor": as in a real run
    ``fresh``    Inductor's caches are not used
    """

    name: str
    inputs: str | None = None
    arguments: Sequence[str] = ()
    codegen: str = "eager"
    fresh: bool = False
    settings: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, watch: Callable[[Capture], contextlib.AbstractContextManager[None]]) -> Outcome:
        """Runs the target; ``watch`` is entered with the capture while it runs.

        Raises TargetError where there is nothing to run."""
        run = self._script() if self.name.endswith(".py") else self._function()
        with _import_from(os.getcwd()), self._settings(), backend.enabled(), watching.backward_at_once():
            with capture(fresh=self.fresh, codegen=self.codegen) as captured, watch(captured):
                outcome = Outcome(captured)
                try:
                    run()
                except TargetError:
                    raise
                except SystemExit as error:
                    outcome.error = error if error.code not in (None, 0) else None
                except (Exception, KeyboardInterrupt) as error:
                    outcome.error = error
        return outcome

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        try:
            patch = config.patch(**self.settings)
            patch.__enter__()
        except (ValueError, AttributeError) as error:
            raise TargetError(str(error)) from None
        try:
            yield
        finally:
            patch.__exit__(None, None, None)

    # Scripts

    def _script(self) -> Callable[[], None]:
        path = os.path.abspath(self.name)
        if not os.path.isfile(path):
            raise TargetError(f"there is no file {self.name}")
        if self.inputs is not None:
            raise TargetError("--inputs goes with module:function; a script makes its own")

        def run() -> None:
            before = sys.argv
            sys.argv = [self.name, *self.arguments]
            try:
                with _import_from(os.path.dirname(path)):
                    runpy.run_path(path, run_name="__main__")
            finally:
                sys.argv = before

        return run

    # Functions

    def _function(self) -> Callable[[], None]:
        module, colon, name = self.name.partition(":")
        if not (module and colon and name):
            raise TargetError(f"{self.name!r} is neither script.py nor module:function")

        def run() -> None:
            function = _look_up(module, name)
            if self.inputs is not None:
                where, _, which = self.inputs.rpartition(":")
                given = _look_up(where or module, which)()
                _call(function, *_arguments(given))
                return
            needed = _required(function)
            if needed:
                raise TargetError(HOW_TO_GIVE_INPUTS.format(name=name, module=module, needed=", ".join(needed)))
            result = function()
            if isinstance(result, tuple) and result and callable(result[0]) and len(result) <= 3:
                args = tuple(result[1]) if len(result) > 1 else ()
                _call(result[0], args, dict(result[2]) if len(result) > 2 else {})

        return run


HOW_TO_GIVE_INPUTS = """{name} takes arguments ({needed}). Write beside it a function of no arguments that returns them,
    def inputs():
        return hidden, weight, ...
and add --inputs inputs; or name a function of no arguments that returns ({name}, (hidden, weight, ...)), or that
compiles and runs what you want to see."""


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compiles and runs a function once, forward only."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        torch.compile(fresh_copy(unwrapped(function)), backend=backend.inductor_grpo)(*args, **kwargs)


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    if isinstance(given, (list, tuple)):
        pair = len(given) == 2 and isinstance(given[0], (list, tuple)) and isinstance(given[1], dict)
        return (tuple(given[0]), given[1]) if pair else (tuple(given), {})
    return (given,), {}


def _look_up(module: str, name: str) -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise TargetError(f"there is no module {module!r} here; run this from the folder that holds it") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{module!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{module}:{name} is a {type(found).__name__}, not a function")
    return found


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in kinds]


@contextlib.contextmanager
def _import_from(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
