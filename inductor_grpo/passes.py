"""The pass, as a table of contents: normalise, find, plan, rewrite, report.

It runs on the joint forward and backward graph of training and on the forward graph of inference, before Inductor's own
passes touch it, on a copy: whatever goes wrong leaves the user's graph as it was.
"""

from __future__ import annotations

import dataclasses

import torch.fx as fx

from . import ops, plan
from .components import given_logits
from .config import Settings
from .graph import nbytes, node_arg
from .normalise import normalise
from .report import Location, Rejection, Report
from .stream import Refused, stream

OPERATORS = (ops.rows, ops.tiles)
"""What a rewrite calls; importing them registers them."""


def rewrite_graph(graph: fx.Graph, settings: Settings) -> Report:
    """Replaces the logits regions of ``graph`` by streamed ones, in place; a failure leaves the graph as it was.

    Returns what was rewritten and, for each region that was not, why.
    """
    rejections: list[Rejection] = []
    left_alone: frozenset[int] = frozenset()
    while True:
        candidate = normalise(graph)
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
        break
    if report.rewrites:
        adopt(graph, candidate)
    elif not rejections:
        rejections.append(_without_head(candidate, settings))
    return Report(report.rewrites, rejections + report.rejections)


def _without_head(graph: fx.Graph, settings: Settings) -> Rejection:
    softmax = given_logits(graph, plan.least_bytes(graph, settings))
    if softmax is not None:
        message = (
            "the logits come in as an argument; compile the head together with this loss, and pass it hidden states"
        )
        return Rejection("LOGITS_GIVEN", message, Location.of(softmax), nbytes(node_arg(softmax, 0)))
    message = (
        "no matmul of this graph was taken for a head (hidden [tokens, H] x one weight [H, V], V > H, reduced over V);"
        " compile the head and the loss together, and look for a graph break between them"
    )
    return Rejection("NO_HEAD", message)


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
