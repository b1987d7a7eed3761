"""The seam: per-token terms, summed per segment, and what comes back from the segments to the tokens.

``new_zeros(num_segments).index_add_(0, ids, log_ratio * weight)`` and its relatives become calls of one operator that
takes all sums of a stage in one pass, together with the terms that they are made of; the number of segments is an
argument like any other, so that no size of it needs code of its own.  This is GSPO's sequence-level ratio
(https://arxiv.org/abs/2507.18071) in packed batches, forward and backward, whatever stands between sums and loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from .._compat import fxgraph, lookups
from ..config import Settings
from ..depth import after_tangent
from ..graph import GraphBuilder, args_of, aten, shape, target_of, value
from ..report import Location, Rejection, Report, Rewrite
from . import launch
from .hoist import Hoist
from .recompute import is_cheap, recompute_token_terms
from .spellings import normalise_sums
from .stages import Stage, emit_stages, plan_stages
from .sums import Ids, Sum, find_sums, gathered, ids_of

NAME = "segment_sums"
FUSED_DEVICES = ("cuda",)
"""Where the terms are computed by the call that sums them.  Inductor's code for a CPU computes them as fast."""


def fuse_seams(graph: fx.Graph, settings: Settings, rewrites: int) -> Report:
    """Rewrites every sum per segment of ``graph``, in place; ``rewrites`` were made in it before."""
    if NAME not in settings.disable:
        normalise_sums(graph, after_tangent(graph))
    sums = find_sums(graph)
    if not sums:
        return Report()
    if (rejection := _reason_to_leave(sums[0], settings, rewrites)) is not None:
        return Report(rejections=[rejection])
    late = after_tangent(graph)
    builder = GraphBuilder(graph, late)
    for place, s in enumerate(sums):
        if s.node in late:
            sums[place] = _without_tangent(builder, s, late)
    fxgraph.sort_topologically(graph)
    fused = value(sums[0].node).device.type in FUSED_DEVICES
    late = after_tangent(graph)
    stages = plan_stages(graph, sums, late, with_totals=fused)
    emit_stages(builder, stages, _supported() if fused else _nothing, late)
    fxgraph.sort_topologically(graph)
    _write_inputs_last(graph)
    lookups.own_tables(graph)
    graph.eliminate_dead_code()
    if fused:
        recompute_token_terms(graph, [stage.tokens for stage in stages], after_tangent(graph))
    return Report([_rewrite_of(stage, fused) for stage in stages])


def _write_inputs_last(graph: fx.Graph) -> None:
    """Moves the copies into mutated inputs behind what was added: every other node reads what the input held before."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    for node in list(graph.nodes):
        if target_of(node) is torch.ops.aten.copy_.default and not node.users.keys() - {output}:
            output.prepend(node)


def _reason_to_leave(s: Sum, settings: Settings, rewrites: int) -> Rejection | None:
    if NAME in settings.disable:
        return Rejection("DISABLED", f"grpo.disable names {NAME}", Location.of(s.node))
    if settings.max_rewrites is not None and rewrites >= settings.max_rewrites:
        message = f"grpo.max_rewrites allows {settings.max_rewrites} rewrites in one graph"
        return Rejection("DISABLED", message, Location.of(s.node))
    return None


def _read_by_tokens_alone(s: Sum) -> bool:
    """Whether all that becomes of a sum is read through its ids.

    A gradient that is not finite, of a loss divided by zero, makes ``0 * inf`` of the sum over no tokens, which nobody
    reads then."""
    work, seen = [s.node], {s.node}
    while work:
        for user in work.pop().users:
            if user in seen or _reads_its_tokens(user, s.ids):
                continue
            if not is_cheap(user) and not _is_column(user):
                return False
            seen.add(user)
            work.append(user)
    return True


def _reads_its_tokens(node: fx.Node, ids: Ids) -> bool:
    """Whether a node is ``table[ids]``, of a value or of a row of values a segment."""
    if (read := gathered(node)) is not None:
        return read[1].same_as(ids)
    if target_of(node) is not aten.index.Tensor or ids.columns is not None:
        return False
    indices = args_of(node)[1]
    return len(indices) == 1 and Ids(ids_of(indices[0])).same_as(ids)


def _is_column(node: fx.Node) -> bool:
    """Whether a node puts a value a segment into a column of a table with a row a segment."""
    return target_of(node) is aten.select_scatter.default and args_of(node)[2] % len(shape(node)) != 0


def _without_tangent(builder: GraphBuilder, s: Sum, late: set[fx.Node]) -> Sum:
    """The same sum as a product of the loss's gradient and a sum that does not wait for it, where it is one."""
    if s.base is not None or s.mean is not None or not _read_by_tokens_alone(s):
        return s
    product = Hoist(builder, late).split(s.values)
    if product is None or product.rest is None:
        return s
    args = list(s.node.args)
    args[args.index(s.values)] = product.rest
    early = builder.call(s.node.target, *args, **s.node.kwargs)
    early.meta.update({k: v for k, v in s.node.meta.items() if k != "val"})
    scaled = builder.call(torch.ops.aten.mul.Tensor, early, product.factor)
    s.node.replace_all_uses_with(scaled)
    late.add(scaled)
    return Sum(early, product.rest, s.ids, s.count, None, None, s.wraps, s.alpha)


def _supported() -> Callable[[str], bool]:
    return launch.supported


def _nothing(target: str) -> bool:
    return False


def _rewrite_of(stage: Stage, fused: bool) -> Rewrite:
    first = stage.sums[0].node if stage.sums else stage.totals[0]
    parts = [_number(len(stage.sums), "sum") + " per segment"] if stage.sums else []
    parts += [_number(len(stage.totals), "total")] if stage.totals else []
    schedule = ("one kernel: " if fused else "one call: ") + ", ".join(parts)
    return Rewrite(NAME, schedule, Location.of(first), 0, 0, 0)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
