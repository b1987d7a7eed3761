"""Graph breaks: where Dynamo cut a function in two, and what that means for the logits."""

from __future__ import annotations

import dataclasses
import os

import torch.fx as fx

from inductor_grpo._compat import watching
from inductor_grpo.report import Location, Rejection, Report

CURE = "remove what breaks the graph (torch.compile(fullgraph=True) raises there), so that head and loss are one graph"


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Where a graph ends, and why, in Dynamo's words."""

    location: Location | None
    reason: str

    @property
    def cure(self) -> str:
        """What to change so that head and loss become one graph."""
        if "output shape depends" in self.reason or "dynamic output shape" in self.reason.lower():
            return (
                "have torch trace sizes that are data (torch._dynamo.config.capture_dynamic_output_shape_ops = True),"
                " so that head and loss are one graph"
            )
        return CURE

    def __str__(self) -> str:
        place = f" at {_short(self.location)}" if self.location else ""
        return f"the graph break{place} ({self.reason})"


def break_after(gm: object) -> GraphBreak | None:
    """The graph break that a Dynamo graph ends with; None when it ends with the function."""
    found = watching.graph_break(gm)
    if found is None:
        return None
    trace, reason = found
    return GraphBreak(Location.from_trace(trace), reason)


def name_breaks(report: Report, graph: fx.Graph, after: GraphBreak | None) -> Report:
    """The report with the graph breaks named in the rejections that come from one.

    ``after`` is the break that the graph ends with; that a graph starts after one is read off its lines.
    """
    if not any(r.code in ("LOGITS_RETURNED", "LOGITS_GIVEN", "NO_HEAD") for r in report.rejections):
        return report
    before = _break_before(graph)
    return dataclasses.replace(report, rejections=[_named(r, before, after) for r in report.rejections])


def _break_before(graph: fx.Graph) -> Location | None:
    for node in graph.nodes:
        location = Location.of(node)
        if location is not None and location.after_break is not None:
            return Location(location.file, location.after_break, location.user_function)
    return None


def _named(rejection: Rejection, before: Location | None, after: GraphBreak | None) -> Rejection:
    if rejection.code == "LOGITS_RETURNED" and after is not None and "gradient" not in rejection.why:
        op = rejection.op or "an operation"
        message = f"the vocabulary-sized result of {op} leaves the graph at {after}; {after.cure}"
    elif rejection.code == "LOGITS_GIVEN" and before is not None:
        message = f"the logits were made before the graph break at {_short(before)}, in another graph; {CURE}"
    elif rejection.code == "NO_HEAD" and (before is not None or after is not None):
        ends = f"it ends with {after}" if after is not None else ""
        starts = f"it starts after the graph break at {_short(before)}" if before is not None else ""
        message = f"{rejection.why}, and {' and '.join(filter(None, (starts, ends)))}; {after.cure if after else CURE}"
    else:
        return rejection
    return Rejection(rejection.code, message, rejection.location, rejection.bytes, rejection.op)


def _short(location: Location) -> str:
    return f"{os.path.basename(location.file)}:{location.line}"
