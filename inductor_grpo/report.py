"""What was rewritten and what was not, as data; text and JSON are views of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from inductor_grpo import cures

if TYPE_CHECKING:
    import torch.fx

CODES: dict[str, str] = {
    "NO_HEAD": "no matmul that makes logits is in this graph",
    "TOO_SMALL": "the logits are smaller than grpo.min_logits_bytes",
    "UNPROFITABLE": "streaming would save nothing here",
    "DISABLED": "switched off by grpo.disable or grpo.max_rewrites",
    "LOGITS_GIVEN": "the logits are an argument of the compiled function",
    "LOGITS_RETURNED": "a vocabulary-sized tensor leaves the compiled function",
    "NO_ROW_RULE": "an operation on the logits is not known to treat rows apart",
    "MIXES_ROWS": "an operation on the logits mixes the rows of different tokens",
    "RANDOM": "an operation on the logits draws random numbers",
    "LAYOUT": "the vocabulary dimension could not be followed through a view or broadcast",
    "INTERNAL": "the rewrite failed; the graph was left as it was",
}
"""Every rejection code with its meaning; codes are stable, messages are not."""

NOT_A_FAULT = frozenset({"NO_HEAD"})
"""Codes that leave no vocabulary-sized tensor behind, so that ``grpo.require`` has nothing to object to."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.*)_at_(?P<line>\d+)$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')


@dataclasses.dataclass(frozen=True)
class Location:
    """A line of the user's source."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        where = f"{os.path.basename(self.file)}:{self.line}"
        where += f" in {self.user_function}" if self.function else ""
        return f"{where}: {self.code}" if self.code else where

    @classmethod
    def of(cls, node: torch.fx.Node) -> Location | None:
        """The innermost frame of ``node`` in a file of the user's own, or in an installed library that is neither
        torch's nor ours where the user has no frame; None when there is none.

        A backward node carries the trace of the forward line that it differentiates.
        """
        trace = node.meta.get("stack_trace")
        return cls.from_trace(trace) if isinstance(trace, str) else None

    @property
    def after_break(self) -> int | None:
        """The line of the graph break after which this line runs, in a graph that starts at one; None elsewhere."""
        match = _RESUMED.match(self.function)
        return int(match["line"]) if match else None

    @property
    def user_function(self) -> str:
        """The function as the user named it: what runs after a graph break has a name of Dynamo's own."""
        match = _RESUMED.match(self.function)
        return match["function"] if match else self.function

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def from_trace(cls, trace: str) -> Location | None:
        """The same, of the text of a traceback with the innermost call last."""
        lines = trace.splitlines()
        frames = [(i, match) for i, line in enumerate(lines) if (match := _FRAME.match(line))]
        frames = [(i, match) for i, match in reversed(frames) if _is_user_file(match["file"])]
        for index, match in [f for f in frames if not _is_installed(f[1]["file"])] + frames:
            has_code = index + 1 < len(lines) and _FRAME.match(lines[index + 1]) is None
            code = lines[index + 1].strip() if has_code else ""
            return cls(match["file"], int(match["line"]), (match["function"] or "").strip(), code)
        return None


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.replace("\\", "/").split("/"))


@functools.lru_cache(maxsize=1024)
def _is_user_file(file: str) -> bool:
    own = os.path.dirname(os.path.abspath(__file__))
    libraries = (own + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
    path = os.path.abspath(file)
    if path.startswith((os.path.join(own, "tools") + os.sep, os.path.join(own, "patterns") + os.sep)):
        return True  # the demo's loss and the examples of patterns are user code
    return not file.startswith("<") and not path.startswith(libraries)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One region that runs streamed.

    ``pattern`` is the name of the pattern that took it or "engine"; ``schedule`` how it runs ("two-pass", ...);
    ``bytes_*`` the vocabulary-sized memory that is live at once before and after, at the sizes seen while compiling;
    ``matmuls`` how many head-sized matrix products the region runs.
    """

    pattern: str
    schedule: str
    location: Location | None
    bytes_before: int
    bytes_after: int
    matmuls: int

    @property
    def bytes_saved(self) -> int:
        """Bytes that no longer exist at the peak."""
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        if not (self.matmuls or self.bytes_before):  # a seam: it is about kernels, not about memory
            return f"{_place(self.location)} [{self.pattern}, {self.schedule}]"
        work = f"{self.pattern}, {self.schedule}, {self.matmuls} matmul{'s' * (self.matmuls != 1)}"
        return f"{_place(self.location)} [{work}] {human(self.bytes_before)} -> {human(self.bytes_after)}"


class Rejection(Exception):
    """One region that was left alone and why; raised where the refusal is found and kept in the report.

    ``code`` is a key of :data:`CODES`, ``message`` a sentence that says why and, after a semicolon, what to change,
    ``bytes`` the size of what stays, ``op`` the operation that keeps it ("log_softmax").
    """

    def __init__(self, code: str, message: str, location: Location | None = None, bytes: int = 0, op: str = "") -> None:
        if code not in CODES:
            raise ValueError(f"unknown rejection code {code!r}; known are {', '.join(CODES)}")
        super().__init__(code, message, location, bytes, op)
        self.code = code
        self.message = message
        self.location = location
        self.bytes = bytes
        self.op = op

    @property
    def why(self) -> str:
        """The first part of the message."""
        return self.message.partition("; ")[0]

    @property
    def cure(self) -> str:
        """What to change: the second part of the message, or what helps with this code in general."""
        return self.message.partition("; ")[2] or cures.cure(self.code, self.op)

    def _key(self) -> tuple[object, ...]:
        return (self.code, self.message, self.location, self.bytes, self.op)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rejection) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        size = f" ({human(self.bytes)})" if self.bytes else ""
        return f"{_place(self.location)} {self.code}: {self.message}{size}"

    def __repr__(self) -> str:
        return f"Rejection({self.code!r}, {self.message!r}, {self.location!r}, {self.bytes!r}, {self.op!r})"


class RequireError(RuntimeError):
    """``grpo.require`` is set and vocabulary-sized tensors stay; ``report`` says which and why."""

    def __init__(self, report: Report) -> None:
        reasons = "\n".join(f"  {rejection}" for rejection in report.obstacles)
        super().__init__(f"grpo.require is set, but vocabulary-sized tensors stay in the graph:\n{reasons}")
        self.report = report


@dataclasses.dataclass
class Report:
    """What happened in one compiled graph, or in several (reports add up)."""

    rewrites: list[Rewrite] = dataclasses.field(default_factory=list)
    rejections: list[Rejection] = dataclasses.field(default_factory=list)
    from_cache: bool = dataclasses.field(default=False, compare=False)
    """True when Inductor's caches answered: the pass did not run; this is the report of the run that filled them."""

    @property
    def bytes_saved(self) -> int:
        """Sum over the rewrites."""
        return sum(rewrite.bytes_saved for rewrite in self.rewrites)

    @property
    def obstacles(self) -> list[Rejection]:
        """The rejections that leave a vocabulary-sized tensor in the graph."""
        return [rejection for rejection in self.rejections if rejection.code not in NOT_A_FAULT]

    def __bool__(self) -> bool:
        return bool(self.rewrites or self.rejections)

    def __add__(self, other: Report) -> Report:
        cached = [report.from_cache for report in (self, other) if report]
        return Report(self.rewrites + other.rewrites, self.rejections + other.rejections, bool(cached) and all(cached))

    def summary(self) -> str:
        """One line."""
        text = f"{_count(len(self.rewrites), 'rewrite')}, {_count(len(self.rejections), 'rejection')}"
        if self.rewrites:
            text += f", {human(self.bytes_saved)} saved"
        codes = sorted({rejection.code for rejection in self.rejections})
        text += f" [{', '.join(codes)}]" if codes else ""
        return text + (" (from cache)" if self.from_cache else "")

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  rewritten   {rewrite}" for rewrite in self.rewrites]
        lines += [f"  left alone  {rejection}" for rejection in self.rejections]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON; ``Report.from_json`` gives it back."""
        data = {
            "rewrites": [dataclasses.asdict(rewrite) for rewrite in self.rewrites],
            "rejections": [
                {
                    "code": rejection.code,
                    "message": rejection.message,
                    "location": rejection.location and dataclasses.asdict(rejection.location),
                    "bytes": rejection.bytes,
                    "op": rejection.op,
                }
                for rejection in self.rejections
            ],
            "from_cache": self.from_cache,
        }
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Report:
        """Reads what :meth:`to_json` wrote; raises ``ValueError``, ``KeyError`` or ``TypeError`` on anything else."""
        data = json.loads(text)
        return Report(
            [Rewrite(**{**item, "location": _location(item["location"])}) for item in data["rewrites"]],
            [Rejection(**{**item, "location": _location(item["location"])}) for item in data["rejections"]],
            bool(data["from_cache"]),
        )


def op_name(node: torch.fx.Node) -> str:
    """The operation as the user called it, as far as torch remembers: "log_softmax" for each part of one."""
    target = node.meta.get("original_aten") or node.target
    name = target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)
    return name.strip("_").removeprefix("native_")


def human(size: int) -> str:
    """``3221225472`` -> ``"3.0 GiB"``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _place(location: Location | None) -> str:
    return "(unknown line)" if location is None else str(location)


def _location(data: dict[str, Any] | None) -> Location | None:
    return None if data is None else Location(**data)
