"""The answer to "what did the compiler do to my loss?", as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from typing import Any

from inductor_grpo.capture import Capture
from inductor_grpo.pattern import all_patterns
from inductor_grpo.report import CODES, Location, Rejection, Report, Rewrite, human
from inductor_grpo.seam import NAME as SEAM
from inductor_grpo.tools.near_misses import near_misses

TOGETHER = """To compile the head and the loss together:

    @torch.compile(backend="inductor_grpo")
    def step(model, ids, labels):
        logits = model(ids).logits     # the head ...
        return loss(logits, labels)    # ... and what reads it, in one compiled function
"""


def as_text(captured: Capture, width: int = 100) -> str:
    """The report for people; ``width`` in characters."""
    if not captured.graphs:
        return "Nothing was compiled: no call of a torch.compile'd function ran.\n"
    report = captured.report
    head = f"{_count(len(captured.graphs), 'graph')} compiled, {_count(len(captured.breaks), 'graph break')}"
    parts = [f"{head}: {report.summary()}"]
    parts += [_cached(captured)] if any(g.from_cache for g in captured.graphs) else []
    if report.rewrites:
        parts.append("Rewritten\n" + _table(report.rewrites))
    if report.rejections:
        blocks = [_block(r, width) for r in _unique(report.rejections)]
        parts.append("Left alone\n" + "\n".join(blocks))
    lines = [line for graph in captured.graphs for near in near_misses(graph) for line in _near(near, graph.notes)]
    if lines:
        parts.append("Near misses (no pattern fits, so the engine's generic way was taken)\n" + "\n".join(lines))
    if captured.breaks:
        breaks = [f"  after graph {g.number}: {g.graph_break}" for g in captured.graphs if g.graph_break]
        parts.append("Graph breaks\n" + "\n".join(breaks))
    if any(r.code in ("LOGITS_GIVEN", "LOGITS_RETURNED") for r in report.rejections):
        parts.append(TOGETHER.rstrip())
    return "\n\n".join(parts) + "\n"


def _cached(captured: Capture) -> str:
    numbers = ", ".join(str(g.number) for g in captured.graphs if g.from_cache)
    return (
        f"Graph {numbers} came from Inductor's cache: the pass did not run, and this is the report of the run that"
        " filled the cache. --fresh compiles anew."
    )


def _table(rewrites: list[Rewrite]) -> str:
    rows = [("where", "pattern", "schedule", "before", "after", "matmuls")]
    for r in rewrites:
        where = _where(r.location)
        sizes = (human(r.bytes_before), human(r.bytes_after), str(r.matmuls)) if r.bytes_before else ("-", "-", "-")
        rows.append((where, r.pattern, r.schedule, *sizes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for index, row in enumerate(rows):
        cells = [cell.rjust(w) if i > 2 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  " + "  ".join(cells).rstrip())
        place = rewrites[index - 1].location if index else None
        if place is not None and place.code:
            lines.append(f"      {place.code}")
    return "\n".join(lines)


def _block(rejection: Rejection, width: int) -> str:
    op = f"  by {rejection.op}" if rejection.op else ""
    size = f"  {human(rejection.bytes)}" if rejection.bytes else ""
    lines = [f"  {rejection.code}  {_where(rejection.location)}{op}{size}"]
    if rejection.location is not None and rejection.location.code:
        lines.append(f"      {rejection.location.code}")
    for name, text in (("why", rejection.why), ("cure", rejection.cure)):
        lines += textwrap.wrap(text, width, initial_indent=f"      {name:<5} ", subsequent_indent=" " * 12)
    return "\n".join(lines)


def _near(near: Any, notes: list[str]) -> list[str]:
    lines = [f"  {_where(near.location)}  {near}"]
    lines += [f"      {note}" for note in notes]
    return lines + [f"      hint: {hint}" for hint in near.hints if near.agree < near.total]


def _where(location: Location | None) -> str:
    if location is None:
        return "(unknown line)"
    return str(Location(location.file, location.line, location.function))


def _unique(rejections: list[Rejection]) -> list[Rejection]:
    return list(dict.fromkeys(rejections))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


# JSON -------------------------------------------------------------------------------------------------------


def as_json(captured: Capture) -> str:
    """The same as JSON; keys are only ever added to it."""
    data = {
        "version": 1,
        "rewrites": len(captured.report.rewrites),
        "bytes_saved": captured.report.bytes_saved,
        "graphs": [_graph(graph) for graph in captured.graphs],
    }
    return json.dumps(data, indent=2, sort_keys=True)


def _graph(graph: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(graph.report.to_json())
    for rejection, entry in zip(graph.report.rejections, data["rejections"]):
        entry["why"], entry["cure"] = rejection.why, rejection.cure
    data |= {"number": graph.number, "seconds": round(graph.seconds, 3), "notes": list(graph.notes)}
    data["graph_break"] = graph.graph_break and {
        "location": _place(graph.graph_break.location),
        "reason": graph.graph_break.reason,
    }
    data["near_misses"] = [
        {
            "pattern": near.pattern,
            "agree": near.agree,
            "total": near.total,
            "expected": near.expected,
            "found": near.found,
            "location": _place(near.location),
            "hints": list(near.hints),
        }
        for near in near_misses(graph)
    ]
    return data


def _place(location: Location | None) -> dict[str, Any] | None:
    if location is None:
        return None
    return {"file": location.file, "line": location.line, "function": location.user_function, "code": location.code}


# Expectations -----------------------------------------------------------------------------------------------

TOTALS = ("rewrites", "rejections", "engine")


def counts(report: Report) -> Counter[str]:
    """How often each name that ``--expect`` knows occurs: patterns, "engine", codes, and the totals."""
    found: Counter[str] = Counter(rewrites=len(report.rewrites), rejections=len(report.rejections))
    found.update(name for rewrite in report.rewrites for name in rewrite.pattern.split("+"))
    found.update(rejection.code for rejection in report.rejections)
    return found


def parse_expectation(text: str) -> tuple[str, int]:
    """``"selective_logprob=1"`` as a pair; raises ValueError with what may be written."""
    name, equals, number = text.partition("=")
    if not equals or not number.strip().isdigit():
        raise ValueError(f"{text!r} is not NAME=COUNT")
    known = [*TOTALS, SEAM, *all_patterns(), *CODES]
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return name, int(number)


def unmet(report: Report, expected: list[tuple[str, int]]) -> list[str]:
    """A sentence for each expectation that the report does not meet."""
    found = counts(report)
    return [f"expected {name}={n}, found {found[name]}" for name, n in expected if found[name] != n]
