"""The exception of a target as its user would see it: without the frames of the tool that ran it."""

from __future__ import annotations

import os
import runpy
import traceback
from collections.abc import Iterator

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_RUNNERS = (runpy.__file__, "<frozen runpy>", "<frozen importlib")


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and all that it came from, the wrapped exception of torch's BackendCompilerFailed included."""
    work, seen = [error], set[int]()
    while work:
        found = work.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        causes = (getattr(found, "inner_exception", None), found.__cause__, found.__context__)
        work += [cause for cause in causes if isinstance(cause, BaseException)]


def text(error: BaseException) -> str:
    """The traceback from the first frame of the target on."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        frames = list(part.stack)
        while frames and _is_runner(frames[0].filename):
            del frames[0]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(whole.format())


def _is_runner(file: str) -> bool:
    return os.path.abspath(file).startswith(_OURS) or file.startswith(_RUNNERS) or "importlib" in file.split(os.sep)
