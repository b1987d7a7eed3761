"""What became symbolic in a frame, kept beside Inductor's caches for the next process.

Which inputs to make symbols is read off the graph of a first trace, which is then traced once more
(:mod:`inductor_grpo.generalise`).  A process that finds here what an earlier one chose begins with the second trace.

An entry is a guess and nothing else.  Guards come from the trace that is made with it, and a trace in which anything is
not as it was is given up for one without: then the entry is removed.  It is not even tried unless the code, the files
that the trace went through and the settings are the same, and the sizes and numbers that it leaves alone have the
values that they had: a number is left alone for what it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from inductor_grpo import files
from inductor_grpo._compat import frames, hooks, known_floats
from inductor_grpo._compat.first_trace import Beginning
from inductor_grpo._compat.frames import Frame
from inductor_grpo._compat.retrace import Marks

Place = Path
"""The file of an entry."""


def place(beginning: Beginning, folder: Path, parts: Iterable[object]) -> Place:
    """Where the entry of that frame is under ``parts``, all settings that matter."""
    text = [*map(repr, parts), torch.__version__, repr(frames.shape_settings()), *hooks.modes()]
    text += _describe_code(beginning.code)
    for name, value in sorted(beginning.local.items()):
        text.append(f"{name} {type(value).__module__}.{type(value).__qualname__}")
        if value is None or isinstance(value, (bool, str)):
            text.append(repr(value))
    return folder / "frames" / f"{hooks.hash_of(text)}.marks"


def _describe_code(code: types.CodeType) -> Iterator[str]:
    yield f"{frames.code_name(code)} {code.co_flags} {code.co_argcount} {code.co_kwonlyargcount} {code.co_names}"
    yield f"{code.co_varnames} {code.co_freevars} {code.co_cellvars} {hashlib.sha256(code.co_code).hexdigest()}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _describe_code(constant)
        else:  # the order in a set differs between processes
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


# Inputs -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Given:
    """An input: whether it, or which of its dimensions, became symbols; and what the rest of it was.

    ``kind`` is "tensor", "int" or "float".  ``rest`` holds a tensor's sizes with None for the marked ones, or the
    number; None where the number is marked.
    """

    name: str
    kind: str
    rest: Any

    def fits(self, value: Any) -> bool:
        """Whether the input of another call can be treated alike."""
        if self.kind == "tensor":
            if not isinstance(value, torch.Tensor) or frames.is_marked(value) or value.dim() != len(self.rest):
                return False
            marked = None in self.rest
            plain = type(value) is torch.Tensor and value.layout is torch.strided
            same = all(was is None or was == size for was, size in zip(self.rest, value.shape))
            return same and (plain or not marked)
        if self.kind == "int":
            return type(value) is int and (value >= 0 if self.rest is None else value == self.rest)
        return type(value) is float and (math.isfinite(value) if self.rest is None else value == self.rest)


def _inputs(frame: Frame, marks: Marks) -> list[Given] | None:
    dims = {name: marked for name, _, marked in marks.tensors}
    found = []
    for given in frame.inputs():
        value = given.value
        if isinstance(value, torch.Tensor):
            if frames.is_marked(value):
                return None
            marked = dims.get(given.name, frozenset())
            rest: Any = [None if dim in marked else int(size) for dim, size in enumerate(value.shape)]
            found.append(Given(given.name, "tensor", rest))
        elif type(value) is int:
            found.append(Given(given.name, "int", None if given.name in marks.ints else value))
        else:
            symbolic = given.node is not None  # dynamic=True, or Dynamo saw another value before
            if symbolic and frames.static_by_default():
                return None
            found.append(Given(given.name, "float", None if symbolic or given.name in marks.floats else value))
    return found


# Entries ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a first trace led to, before the second has shown that it does."""

    inputs: tuple[Given, ...]
    marks: Marks


def choice(frame: Frame, marks: Marks) -> Choice | None:
    """From the first trace; None where another process should look for itself."""
    if frame.note is None or marks.constants or marks.forgotten:
        return None
    inputs = _inputs(frame, marks)
    return None if inputs is None else Choice(tuple(inputs), marks)


def store(frame: Frame, chosen: Choice) -> None:
    """Keeps what the trace of ``frame`` was made with, once it has compiled."""
    floats = known_floats.where_met(chosen.marks.floats, frame.codes, frame.code)
    stamps = _stamps({file for file, _, _ in frame.codes})
    if floats is None or stamps is None or frame.note is None:
        return
    entry = {
        "end": frame.end,
        "code": frame.code,
        "codes": sorted(frame.codes),
        "floats": floats,
        "files": stamps,
        "inputs": [dataclasses.astuple(given) for given in chosen.inputs],
    }
    files.write(frame.note, json.dumps(entry, sort_keys=True))


def load(where: Place, beginning: Beginning) -> tuple[Marks, tuple[Any, ...]] | None:
    """The marks for the call, and where the trace is to end; None when no entry fits."""
    try:
        entry = json.loads(where.read_text(encoding="utf-8"))
        codes = frozenset((file, line, name) for file, line, name in entry["codes"])
        floats = {name: [(f, line, n) for f, line, n in met] for name, met in entry["floats"].items()}
        inputs = [Given(name, kind, rest) for name, kind, rest in entry["inputs"]]
        end = tuple((file, line) for file, line in entry["end"])
        root = frames.code_name(beginning.code)
        values = {given.name: beginning.value(given.name) for given in inputs}
        same = tuple(entry["code"]) == root and all(given.fits(values[given.name]) for given in inputs)
        if not same or _stamps(entry["files"]) != entry["files"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, LookupError, AttributeError):
        return None
    return _marks(inputs, values, codes, known_floats.unseen(floats, root, beginning.closure)), end


def forget(where: Place) -> None:
    """Removes an entry that led nowhere."""
    with contextlib.suppress(OSError):
        where.unlink()


def _marks(inputs: list[Given], values: Mapping[str, Any], codes: frozenset[Any], unseen: known_floats.Unseen) -> Marks:
    tensors = []
    for given in inputs:
        if given.kind == "tensor" and None in given.rest:
            dims = frozenset(dim for dim, size in enumerate(given.rest) if size is None)
            tensors.append((given.name, values[given.name], dims))
    return Marks(
        "unbacked",
        tuple(tensors),
        frozenset(given.name for given in inputs if given.kind == "int" and given.rest is None),
        frozenset(name for _, name in unseen),
        codes=codes,
        unseen=unseen,
    )


def _stamps(names: Iterable[str]) -> dict[str, list[int]] | None:
    """What changes with the content of the files; None when one is not there: a cell of a notebook."""
    try:
        found = {name: os.stat(name) for name in names}
    except OSError:
        return None
    return {name: [stat.st_mtime_ns, stat.st_size] for name, stat in found.items()}
