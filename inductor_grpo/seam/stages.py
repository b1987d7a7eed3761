"""Which sums are taken together, and the calls that take them.

A *stage* is one call of ``inductor_grpo::segments``: the sums of one set of ids that can be computed at the same time,
and with them the sums over all tokens that read the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from .._compat.collectives import is_collective
from ..graph import GraphBuilder, Size, args_of, aten, is_one, numel, prims, same, shape, target_of, value
from .epilogue import Epilogue, descendants
from .ops import segments
from .program import accumulator
from .sums import Ids, Sum, gathered
from .terms import Terms


@dataclasses.dataclass
class Stage:
    """Sums and totals of one call; ``late`` in the backward.

    ``negative``: ids may be negative and count from the end, as no sum of the graph forbids them.
    """

    ids: Ids
    count: Size
    level: int
    late: bool
    negative: bool = True
    sums: list[Sum] = dataclasses.field(default_factory=list)
    totals: list[fx.Node] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> Size:
        """How many tokens there are."""
        return numel(shape(self.ids.node))


def levels(graph: fx.Graph, sums: list[Sum]) -> dict[fx.Node, int]:
    """How many sums, one after the other, lead to each node; to a collective also those that lead to the one before
    it, since they keep their order."""
    found: dict[fx.Node, int] = {}
    collectives = 0
    summed = {s.node for s in sums}
    for node in graph.nodes:
        before = max((found[a] for a in node.all_input_nodes), default=0)
        if is_collective(node):
            before = collectives = max(before, collectives)
        found[node] = before + (node in summed or is_total(node))
    return found


def is_total(node: fx.Node) -> bool:
    """A sum over all elements."""
    target = target_of(node)
    if target is aten.sum.default:
        return True
    if target is not aten.sum.dim_IntList:
        return False
    sizes, dims = shape(node.args[0]), args_of(node)[1]
    summed = {d % max(1, len(sizes)) for d in dims} if dims else set(range(len(sizes)))
    return all(d in summed or is_one(s) for d, s in enumerate(sizes))


def plan_stages(graph: fx.Graph, sums: list[Sum], late: set[fx.Node], with_totals: bool) -> list[Stage]:
    """The stages of a graph, in the order in which they can run."""
    depth = levels(graph, sums)
    stages: list[Stage] = []

    def stage_of(ids: Ids, count: Size, level: int, is_late: bool) -> Stage:
        for stage in stages:
            if stage.level == level and stage.late == is_late and stage.ids.same_as(ids) and same(stage.count, count):
                return stage
        negative = all(s.wraps for s in sums if s.ids.same_as(ids))
        stages.append(Stage(ids, count, level, is_late, negative))
        return stages[-1]

    for s in sums:
        stage_of(s.ids, s.count, depth[s.node], s.node in late).sums.append(s)
    if with_totals:
        seams = [(s.ids, s.count) for s in sums]
        for node in graph.nodes:
            if not is_total(node) or numel(shape(node)) != 1 or value(node).dtype.is_complex:
                continue
            place = _seam_of(node, seams)
            if place is not None:
                stage_of(*place, depth[node], node in late).totals.append(node)
        for node in graph.nodes:
            if (
                is_total(node)
                and not value(node).dtype.is_complex
                and not any(node in stage.totals for stage in stages)
            ):
                _attach(node, depth[node], node in late, stages)
    return sorted(stages, key=lambda stage: (stage.late, stage.level))


def _seam_of(total: fx.Node, seams: list[tuple[Ids, Size]]) -> tuple[Ids, Size] | None:
    """The seam whose per-segment values a total reads, through pointwise values of the tokens."""
    tokens = numel(shape(total.args[0]))
    work, seen = [total.all_input_nodes[0]], set()
    while work:
        node = work.pop()
        if node in seen or node.op != "call_function" or not isinstance(value(node), torch.Tensor):
            continue
        seen.add(node)
        if (read := gathered(node)) is not None:
            for ids, count in seams:
                if read[1].same_as(ids) and same(numel(shape(ids.node)), tokens):
                    return ids, count
            continue
        if same(numel(shape(node)), tokens):
            work += node.all_input_nodes
    return None


def _attach(total: fx.Node, level: int, late: bool, stages: list[Stage]) -> None:
    """Puts a total of other token values into a stage that runs at the same time anyway."""
    tokens = numel(shape(total.args[0]))
    for stage in stages:
        if stage.level == level and stage.late == late and same(stage.tokens, tokens):
            stage.totals.append(total)
            return


def emit_stages(
    builder: GraphBuilder, stages: list[Stage], supported: Callable[[str], bool], late: set[fx.Node]
) -> None:
    """Replaces the sums and totals of each stage by one call; ``late`` are the nodes of the backward."""
    for place, stage in enumerate(stages):
        _emit(builder, stage, supported, stages[place:], late)


def _emit(
    builder: GraphBuilder, stage: Stage, supported: Callable[[str], bool], left: list[Stage], late: set[fx.Node]
) -> None:
    terms = Terms(builder, stage.ids, stage.tokens, stage.count, supported, stage.negative)
    names = [terms.token(_widened(builder, _per_token(builder, s, stage.tokens))) for s in stage.sums]
    counted = [i for i, s in enumerate(stage.sums) if s.mean is not None]
    if counted:
        like = stage.sums[counted[0]].values
        names.append(terms.token(builder.full(shape(like), 1, torch.float32, value(like).device)))
    totals = {t: terms.token(_as_totalled(builder, t)) for t in stage.totals}
    wraps = all(s.wraps for s in stage.sums)
    waiting = descendants([n for s in left for n in (*(x.node for x in s.sums), *s.totals)])
    epilogue = Epilogue(terms, totals, waiting, late, stage.late)
    results = epilogue.outputs()
    program = terms.program(list(dict.fromkeys(names)), list(dict.fromkeys(totals.values())), wraps)
    if epilogue.calls:
        returned = tuple(dict.fromkeys(results.values()))
        program = dataclasses.replace(program, after=tuple(epilogue.calls), finals=returned)
    inputs = [list(terms.inputs[space]) for space in ("token", "segment", "scalar")]
    ids, count = flat_ids(builder, stage.ids), builder.dim(stage.count)
    call = builder.call(segments, inputs[0], ids, inputs[1], inputs[2], count, list(terms.ints), program.to_text())
    per_segment = {name: builder.getitem(call, i) for i, name in enumerate(program.sums)}
    single = {name: builder.getitem(call, len(per_segment) + i) for i, name in enumerate(program.returned)}
    for s, name in zip(stage.sums, names):
        put(s.node, _finished(builder, s, per_segment[name], per_segment[names[-1]] if counted else None))
    for node, name in results.items():
        put(node, builder.view(single[name], shape(node)))


def _per_token(builder: GraphBuilder, s: Sum, tokens: Size) -> fx.Node:
    """The values of a sum; index_put takes fewer of them than ids."""
    if target_of(s.node) is not aten.index_put.default or same(numel(shape(s.values)), tokens):
        return s.values
    index: Any = s.node.args[1]
    return builder.call(aten.expand.default, s.values, builder.dims(shape(index[0])))


def _as_totalled(builder: GraphBuilder, total: fx.Node) -> fx.Node:
    """What a total adds up, cast first where it was told a dtype."""
    x, dtype = total.all_input_nodes[0], total.kwargs.get("dtype")
    return _cast(builder, x, accumulator(dtype)) if isinstance(dtype, torch.dtype) else x


def _widened(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """In the dtype in which it is summed: on the way to the call, where it costs nothing."""
    return _cast(builder, x, accumulator(value(x).dtype))


def flat_ids(builder: GraphBuilder, ids: Ids) -> fx.Node:
    """The ids as ``[N]``, numbered over the whole batch."""
    node = ids.node
    if ids.columns is None:
        return builder.view(node, [numel(shape(node))])
    columns, device = ids.columns, value(node).device
    rows, width = ids.sizes
    node = builder.view(node, [rows, width])
    row = builder.view(builder.iota(rows, device), [rows, 1])
    moved = builder.call(aten.add.Tensor, node, builder.call(aten.mul.Tensor, row, builder.dim(columns)))
    # An id outside of its row must not count in another one.
    low = builder.call(aten.lt.Scalar, node, 0)
    high = builder.call(aten.ge.Scalar, node, builder.dim(columns))
    outside = builder.call(aten.logical_or.default, low, high)
    nowhere = builder.full([], -1, torch.int64, device)
    return builder.view(builder.call(aten.where.self, outside, nowhere, moved), [rows * width])


def put(old: fx.Node, new: fx.Node) -> None:
    """Puts ``new`` in the place of ``old``."""
    old.replace_all_uses_with(new)
    new.meta.setdefault("stack_trace", old.meta.get("stack_trace"))


def _finished(builder: GraphBuilder, s: Sum, total: fx.Node, tokens: fx.Node | None) -> fx.Node:
    """A sum as its node had it: its dtype, its buffer's former values, the mean."""
    dtype, sizes = value(s.node).dtype, shape(s.node)
    if s.alpha != 1:
        total = builder.call(aten.mul.Tensor, total, s.alpha)
    if s.base is not None and s.mean is not False:
        total = builder.call(aten.add.Tensor, builder.view(s.base, [s.count]), total)
    if s.mean is not None:
        assert tokens is not None
        if s.mean:
            tokens = builder.call(aten.add.Tensor, tokens, 1)
        mean = builder.call(aten.div.Tensor, total, builder.call(aten.clamp_min.default, tokens, 1))
        if s.base is not None and not s.mean:
            base = _cast(builder, builder.view(s.base, [s.count]), value(mean).dtype)
            mean = builder.call(aten.where.self, builder.call(aten.eq.Scalar, tokens, 0), base, mean)
        total = mean
    return builder.view(_cast(builder, total, dtype), sizes)


def _cast(builder: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if value(x).dtype == dtype else builder.call(prims.convert_element_type.default, x, dtype)
