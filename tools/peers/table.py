"""The results as text, as a Markdown table, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from inductor_grpo.tools.peers.judge import Result

HEADER = ("package", "function", "how", "regions", "matmuls", "seam", "error (eager's)", "equal", "graphs")


def as_json(results: list[Result]) -> str:
    """One object a case."""
    return json.dumps([{**dataclasses.asdict(r), "rewritten": r.rewritten} for r in results], indent=1)


def from_json(text: str) -> list[Result]:
    """What :func:`as_json` wrote."""
    rows = json.loads(text)
    return [Result(**{key: value for key, value in row.items() if key != "rewritten"}) for row in rows]


def as_text(results: list[Result]) -> str:
    """A few lines a case, for a terminal."""
    lines: list[str] = []
    for r in results:
        lines.append(f"{r.name}  ({r.seconds:.1f} s)")
        lines.append(f"    {r.function}: {r.how}")
        lines += [f"    {what}" for what in _outcome(r)]
        lines += [f"    {note}" for note in _notes(r)]
    return "\n".join([*lines, summary(results)])


def _outcome(r: Result) -> Iterable[str]:
    if r.error:
        yield f"error      {r.error}"
        if r.stock:
            yield f"stock      {r.stock}"
        return
    yield f"rewritten  {'; '.join(r.regions) or 'no'}, {r.matmuls} matmuls" if r.regions else "rewritten  no"
    if r.seams:
        yield f"seam       {'; '.join(r.seams)}"
    yield f"equal      {'yes' if r.equal else 'NO'}: error {r.ours:.1e}, eager's {r.eager:.1e}"


def _notes(r: Result) -> Iterable[str]:
    yield from (f"left       {text}" for text in r.left)
    yield from (f"break      {text}" for text in dict.fromkeys(r.breaks))
    if r.cure and _needs_one(r):
        yield f"write      {r.cure}"


def summary(results: list[Result]) -> str:
    """One line."""
    equal = sum(r.equal for r in results)
    whole = sum(r.rewritten for r in results)
    return (
        f"{len(results)} cases: {whole} rewritten, {equal} equal to eager, {sum(bool(r.error) for r in results)} errors"
    )


def as_markdown(results: list[Result]) -> str:
    """One table for each package, and below it where a graph breaks, what stays and what to write."""
    parts: list[str] = []
    for title in dict.fromkeys((r.package, r.version) for r in results):
        own = [r for r in results if (r.package, r.version) == title]
        parts.append(f"## {title[0]} {title[1]}\n")
        parts.append("| function | how it is called | head | matmuls | sums per segment | error / eager's | equal |")
        parts.append("|---|---|---|---|---|---|---|")
        notes: list[str] = []
        for r in own:
            note, mark = "; ".join(_remarks(r)), ""
            if note:
                notes += [note] if note not in notes else []
                mark = f" ({notes.index(note) + 1})"
            head = "error" if r.error else "; ".join(r.regions) or "left alone"
            errors = "" if r.error else f"{r.ours:.1e} / {r.eager:.1e}"
            equal = "" if r.error else "yes" if r.equal else "**no**"
            cells = (f"`{_short(r.function)}`", r.how, head + mark, str(r.matmuls), "; ".join(r.seams), errors, equal)
            parts.append(f"| {' | '.join(c.replace('|', '/') for c in cells)} |")
        parts += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""] if notes else [""]
    return "\n".join([*parts, summary(results)])


def _remarks(r: Result) -> Iterable[str]:
    if r.error:
        yield r.error + (f"; stock `torch.compile` fails as well ({r.stock})" if r.stock else "")
    yield from (text.replace("|", "/") for text in r.left)
    places = list(dict.fromkeys(text.split(": ")[0].split(" (")[0] for text in r.breaks))
    if places:
        yield "graph breaks at " + ", ".join(f"`{place}`" for place in places)
    if r.cure and _needs_one(r):
        yield r.cure


def _needs_one(r: Result) -> bool:
    return bool(r.error or r.left or r.breaks)


def _short(function: str) -> str:
    return function.replace(", ", "`, `")
