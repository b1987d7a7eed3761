"""The report as one HTML page that needs nothing else: no network, no other files."""

from __future__ import annotations

import dataclasses
import io
import linecache
import os
from importlib import resources
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

import inductor_grpo
from inductor_grpo._compat import watching
from inductor_grpo.canonical import print_graph, program_of, program_text
from inductor_grpo.capture import Capture, CompiledGraph
from inductor_grpo.report import CODES, Location, Rejection, human
from inductor_grpo.tools.dump import region_of
from inductor_grpo.tools.memory import Timeline, timeline
from inductor_grpo.tools.near_misses import near_misses

BEFORE, AFTER = "#c2543d", "#2f7d4f"
AROUND = 3
"""Lines of source shown before and after the one at fault."""


def page(captured: Capture, target: str) -> str:
    """The page as text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["human"] = human
    template = environment.from_string(resources.files(__package__).joinpath("report.html.j2").read_text("utf-8"))
    graphs = [_Graph.of(graph) for graph in captured.graphs]
    report = captured.report
    return template.render(
        target=target,
        version=inductor_grpo.__version__,
        report=report,
        graphs=graphs,
        breaks=captured.breaks,
        cached=[graph for graph in captured.graphs if graph.from_cache],
        rejections=[_excerpt(r) for r in dict.fromkeys(report.rejections)],
        facts=watching.environment_facts(),
        where=_where,
        peak_before=max((g.before.peak for g in graphs if g.before), default=0),
        peak_after=max((g.after.peak for g in graphs if g.after), default=0),
        codes=CODES,
    )


@dataclasses.dataclass
class _Graph:
    """What the template shows of one compiled graph."""

    number: int
    graph: CompiledGraph
    before: Timeline | None = None
    after: Timeline | None = None
    left: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    right: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    programs: dict[str, str] = dataclasses.field(default_factory=dict)
    plot: str = ""
    near: list[Any] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(graph: CompiledGraph) -> _Graph:
        found = _Graph(graph.number, graph, near=near_misses(graph))
        joint, rewritten = graph.stage("normalised"), graph.stage("rewritten")
        removed, added = region_of(graph)
        if joint is not None:
            found.before = timeline(joint)
            found.left = _lines(joint, found.before, removed)
        if rewritten is not None:
            found.after = timeline(rewritten)
            found.right = _lines(rewritten, found.after, added)
            programs = print_graph(rewritten).programs
            found.programs = {name: program_text(text) for name, text in programs.items()}
        if found.before is not None:
            found.plot = _plot(found.before, found.after)
        return found


def _lines(graph: Any, memory: Timeline, region: frozenset[str]) -> list[dict[str, Any]]:
    printed = print_graph(graph)
    names = {line.node: line.name for line in printed.lines}
    most = max((m.made for m in memory.moments), default=0) or 1
    rows, before = [], None
    for line, moment in zip(printed.lines, memory.moments):
        new = line.location if line.location != before else None
        before = line.location or before
        rows.append(
            {
                "name": line.name.lstrip("%"),
                "text": str(line),
                "kind": "program" if program_of(line.node) else "region" if line.node.name in region else line.node.op,
                "made": human(moment.made) if moment.made else "",
                "live": human(moment.live),
                "bar": round(100 * moment.made / most),
                "place": new and _where(new),
                "code": new.code if new else "",
                "uses": " ".join(names[a].lstrip("%") for a in line.node.all_input_nodes),
            }
        )
    return rows


def _plot(before: Timeline, after: Timeline | None) -> str:
    """Live bytes along both graphs as an SVG element."""
    sides = [("before", before, BEFORE)] + ([("after", after, AFTER)] if after is not None else [])
    top = max(t.peak for _, t, _ in sides) or 1
    unit = next((s, n) for s, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if top >= s)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "inductor_grpo"}):
        figure = Figure(figsize=(10.5, 2.9), layout="constrained")
        axes = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
        for axis, (name, line, colour) in zip(axes, sides):
            live = [m.live / unit[0] for m in line.moments]
            steps = list(range(len(live)))
            axis.fill_between(steps, live, step="mid", color=colour, alpha=0.35, linewidth=0)
            axis.step(steps, live, where="mid", color=colour, linewidth=1.4)
            at = line.peak_index
            axis.plot([at], [live[at]], "o", color=colour, markersize=4)
            side = "right" if at > len(live) / 2 else "left"
            axis.annotate(
                f"peak {human(line.peak)}",
                (at, live[at]),
                (4 if side == "left" else -4, 6),
                textcoords="offset points",
                ha=side,
                fontsize=9,
            )
            axis.set(title=f"{name} the rewrite" if len(sides) > 1 else "live memory", xlabel="operation of the graph")
            axis.set_ylim(0, 1.2 * top / unit[0])
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel(f"live {unit[1]}")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue().partition("?>")[2].partition('dtd">')[2]


def _excerpt(rejection: Rejection) -> dict[str, Any]:
    location = rejection.location
    lines: list[dict[str, Any]] = []
    if location is not None and os.path.exists(location.file):
        numbers = range(max(1, location.line - AROUND), location.line + AROUND + 1)
        texts = [(n, linecache.getline(location.file, n)) for n in numbers]
        lines = [{"number": n, "text": text.rstrip("\n"), "hit": n == location.line} for n, text in texts if text]
    return {"rejection": rejection, "where": _where(location), "lines": lines}


def _where(location: Location | None) -> str:
    return "(unknown line)" if location is None else str(Location(location.file, location.line, location.function))
