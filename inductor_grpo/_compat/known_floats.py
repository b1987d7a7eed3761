"""Dynamo's memory of earlier calls: there a float becomes a symbol once its value has changed.

It knows a float by the function in which Dynamo meets it, which may be one that the compiled function calls.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

Code = tuple[str, int, str]
"""A function: file, first line, name."""
Unseen = tuple[tuple[Any, str], ...]
"""Floats that Dynamo has yet to meet: the function as Dynamo knows it, the name of the float's source."""


def remember(codes: Iterable[Code], floats: Iterable[str], forgotten: Iterable[str]) -> None:
    """Brings the memory to where a change of the floats would, and to before their first call for the others."""
    from torch._dynamo.pgo import auto_dynamic, auto_unset, get_code_state

    known, changes = set(codes), ((set(floats), auto_dynamic), (set(forgotten), auto_unset))
    for code_id, state in get_code_state().items():
        if _code(code_id) in known:
            for names, value in changes:
                for name in names & set(state.automatic_dynamic):
                    state.automatic_dynamic[name].scalar = value


def remember_unseen(unseen: Unseen) -> None:
    """The same for floats that it does not know yet."""
    from torch._dynamo.pgo import auto_dynamic, get_code_state

    for code_id, name in unseen:
        get_code_state()[code_id].automatic_dynamic[name].scalar = auto_dynamic


def where_met(floats: Iterable[str], codes: Iterable[Code], root: Code) -> dict[str, list[Code]] | None:
    """The functions in which Dynamo has met each float; None where another process could not name one of them: it has
    a closure and is not the compiled function itself."""
    from torch._dynamo.pgo import get_code_state

    known = set(codes)
    met: dict[str, list[Code]] = {name: [] for name in floats}
    for code_id, state in get_code_state().items():
        code = _code(code_id)
        for name in met.keys() & state.automatic_dynamic.keys() if code in known else ():
            if code != root and getattr(code_id, "closure_hash", None) is not None:
                return None
            met[name].append(code)
    return met if all(met.values()) else None


def unseen(met: Mapping[str, Iterable[Code]], root: Code, closure: tuple[types.CellType, ...] | None) -> Unseen:
    """What :func:`where_met` found, for :func:`remember_unseen` in a process in which the function has that closure."""
    from torch._dynamo.pgo import CodeId

    def code_id(code: Code) -> Any:
        like: Any = types.SimpleNamespace(co_filename=code[0], co_firstlineno=code[1], co_name=code[2])
        return CodeId.make(like, closure) if code == root and closure else CodeId.make(like)

    return tuple((code_id(code), name) for name, codes in met.items() for code in codes)


def _code(code_id: Any) -> Code:
    return code_id.filename, code_id.firstlineno, code_id.name
