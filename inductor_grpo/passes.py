"""The pass, as a table of contents: normalise, find, plan, rewrite, report.

It runs on the joint forward and backward graph of training and on the forward graph of inference, before Inductor's own
passes touch it, on a copy: whatever goes wrong leaves the user's graph as it was.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import torch.fx as fx

from . import ops, plan
from .capture import observe, tried
from .components import given_logits, largest_product
from .config import Settings
from .depth import forward_first
from .graph import nbytes, node_arg
from .normalise import copied, normalise
from .report import Location, Rejection, Report, op_name
from .seam import NAME as SEAM
from .seam import fuse_seams
from .seam.ops import segments
from .stream import Refused, stream

log = logging.getLogger("inductor_grpo")

OPERATORS = (*ops.OPERATORS, segments)
"""What a rewrite calls; importing them registers them."""


def rewrite_graph(graph: fx.Graph, settings: Settings) -> Report:
    """Replaces the logits regions and the sums per segment of ``graph``, in place; a failure leaves it as it was.

    Returns what was rewritten and, for each region that was not, why.
    """
    observe("joint", graph)
    streamed, report = _with_streams(graph, settings)
    candidate, seams = _with_seams(streamed, settings, len(report.rewrites))
    if report.rewrites and seams.rewrites:
        observe("streamed", streamed)
    if not report:
        rejection = _without_head(candidate, settings)
        if rejection.code != "NO_HEAD" or not seams:
            report.rejections.append(rejection)
    report += seams
    if report.rewrites:
        forward_first(candidate)
        observe("rewritten", candidate)
        adopt(graph, candidate)
    return report


def _with_streams(graph: fx.Graph, settings: Settings) -> tuple[fx.Graph, Report]:
    """A normalised copy in which every region is streamed that can be; one that is refused costs a new start."""
    rejections: list[Rejection] = []
    left_alone: frozenset[int] = frozenset()
    while True:
        candidate = normalise(graph)
        observe("normalised", candidate)
        try:
            report = stream(candidate, settings, left_alone)
        except Refused as refused:
            if refused.schedule is not None:
                settings = dataclasses.replace(settings, schedule=refused.schedule)
                continue
            if refused.heads <= left_alone:
                raise RuntimeError("a region was refused twice") from refused
            rejections.append(refused.rejection)
            left_alone |= refused.heads
            continue
        return candidate, Report(report.rewrites, rejections + report.rejections)


def _with_seams(graph: fx.Graph, settings: Settings, rewrites: int) -> tuple[fx.Graph, Report]:
    """A copy in which the sums per segment are taken together; a fault there must not cost the streams."""
    candidate = copied(graph)
    started = time.perf_counter()
    try:
        report = fuse_seams(candidate, settings, rewrites)
        tried(SEAM, bool(report.rewrites), time.perf_counter() - started)
        return candidate, report
    except Exception as error:
        log.warning("the sums per segment stay as they were", exc_info=True)
        message = f"{type(error).__name__}: {error}; please report this"
        return graph, Report(rejections=[Rejection("INTERNAL", message)])


def _without_head(graph: fx.Graph, settings: Settings) -> Rejection:
    least = plan.least_bytes(graph, settings)
    softmax = given_logits(graph, least)
    if softmax is not None:
        message = (
            "the logits come in as an argument; compile the head together with this loss, and pass it hidden states"
        )
        return Rejection("LOGITS_GIVEN", message, Location.of(softmax), nbytes(node_arg(softmax, 0)), op_name(softmax))
    why = "no matmul of this graph was taken for a head (hidden [tokens, H] x one weight [H, V], V > H, reduced over V)"
    product = largest_product(graph, least)
    if product is not None:
        cure = "if this makes the logits, make them with one weight for all tokens, and reduce them over the vocabulary"
        return Rejection("NO_HEAD", f"{why}; {cure}", Location.of(product), nbytes(product), op_name(product))
    return Rejection(
        "NO_HEAD", f"{why}; compile the head and the loss as one function, without a graph break between them"
    )


def adopt(graph: fx.Graph, candidate: fx.Graph) -> None:
    """Makes ``graph`` what ``candidate`` is; its placeholders stay the same nodes, since Inductor may hold them."""
    placeholders = iter([n for n in graph.nodes if n.op == "placeholder"])
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    output.args = ((),)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    env: dict[fx.Node, fx.Node] = {}
    for node in candidate.nodes:
        if node.op == "placeholder":
            env[node] = next(placeholders)
            continue
        if node.op == "output":
            output.args = fx.map_arg(node.args, lambda n: env[n])
            continue
        with graph.inserting_before(output):
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.lint()
