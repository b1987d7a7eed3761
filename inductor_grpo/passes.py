"""The pass, as a table of contents: normalise, find, plan, rewrite, report.

It runs on the joint forward and backward graph of training and on the forward graph of inference, before Inductor's own
passes touch it, on a copy: whatever goes wrong leaves the user's graph as it was.
"""

from __future__ import annotations

import logging

import torch.fx as fx

from . import ops  # noqa: F401  (registers the op that the rewrite calls)
from .config import Settings
from .normalise import normalise
from .report import Rejection, Report
from .stream import Refused, stream

log = logging.getLogger(__name__)


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
            if refused.heads <= left_alone:
                raise RuntimeError("a region was refused twice") from refused
            rejections.append(refused.rejection)
            left_alone |= refused.heads
            continue
        break
    if report.rewrites:
        adopt(graph, candidate)
    elif not rejections:
        message = (
            "no matmul of this graph was taken for a head (hidden [tokens, H] x one weight [H, V], V > H, reduced"
            " over V); compile the head and the loss together"
        )
        rejections.append(Rejection("NO_HEAD", message))
    return Report(report.rewrites, rejections + report.rejections)


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
