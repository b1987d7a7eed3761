"""Putting chunk programs in the place of a graph's regions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from . import keep, plan, row_kernel
from ._compat import fxgraph
from ._compat.collectives import is_collective, is_functional
from .capture import observe_body
from .components import Component, find_components, is_logits_like, left_behind, reads_another
from .config import Settings
from .depth import TANGENT_DEPTH, after_tangent, effects, live, node_depths
from .draft import Draft, RowInput
from .emit import Region
from .exits import Contribution, Exit, Piece, make_exit
from .graph import GraphBuilder, aten, inputs_through_tuples, map_args, nbytes, node_arg, numel, shape, value
from .heads import find_heads
from .late_rows import separate
from .layout import Layouts
from .loops import join_loops
from .merge import merge
from .normalise import pad_short_indices
from .observed import choose_by_use, in_step
from .one_pass import one_pass
from .report import Location, Rejection, Report, op_name
from .rowmap import RowMap
from .rules import RULES
from .rules.reductions import Reduction, Scan
from .stacks import unstack


class Refused(Exception):
    """A component cannot be streamed; ``heads`` are the positions of its heads in the graph.

    ``schedule`` names another schedule in which it may be possible after all."""

    def __init__(self, heads: frozenset[int], rejection: Rejection, schedule: str | None = None) -> None:
        super().__init__(rejection)
        self.heads = heads
        self.rejection = rejection
        self.schedule = schedule


def stream(graph: fx.Graph, settings: Settings, left_alone: frozenset[int]) -> Report:
    """Rewrites every region of ``graph`` in place, except those of the heads at the positions ``left_alone``.

    Raises :class:`Refused` when a region cannot be rewritten: the graph is then spoiled, and the caller starts again
    from a fresh copy without it.
    """
    heads = find_heads(graph, after_tangent(graph))
    mine = [head for place, head in enumerate(heads) if place not in left_alone]
    join_loops(graph, mine)
    unstack(graph, mine)
    pad_short_indices(graph)
    backward = after_tangent(graph)
    refusals = Refusals({head.node: place for place, head in enumerate(heads)})
    layouts = Layouts()
    components = find_components(graph, layouts, heads, backward)
    chosen = choose(components, layouts, settings, refusals, left_alone)
    if not chosen:
        return Report()
    builder = GraphBuilder(graph, backward)
    _free_sizes(builder, layouts)
    kept = {h.node: h for component in chosen for h in component.heads}
    values = set(graph.nodes) - backward
    floors: dict[fx.Node, int] = {}
    if settings.schedule != "two-pass" and (floors := one_pass(builder, layouts, chosen, settings)):
        refusals.schedule = "two-pass"
        fxgraph.sort_topologically(graph)
    depths = node_depths(graph, layouts, floors)
    if separate(builder, layouts, chosen, depths):
        fxgraph.sort_topologically(graph)
        depths = node_depths(graph, layouts, floors)
    region = Region(builder, layouts, depths, kept)
    exits = find_exits(region, functools.partial(refusals.at, chosen))
    in_step(graph, exits)
    drafts = merge(builder, list(region.drafts.values()), exits)
    choose_by_use(graph, exits)
    calls = emit_calls(builder, drafts, exits, values, settings)
    rewrites = [plan.rewrite_of(component, drafts, exits, settings) for component in chosen]
    for component, rewrite in zip(chosen, rewrites):
        if (rejection := plan.reason_to_undo(component, rewrite, exits, settings)) is not None:
            raise refusals.of([component], rejection)
    put_in_place(builder, exits, calls, chosen, refusals)
    others = {node for component in components if component not in chosen for node in component.nodes}
    others |= {node for draft in drafts for _, node in draft.reuses}  # kept because the settings ask for it
    return Report(rewrites, [_stays(node) for node in left_behind(graph, chosen, others)[:MOST_LEFT_BEHIND]])


class Refusals:
    """Makes :class:`Refused` for components; ``positions`` are those of the head nodes among all heads."""

    def __init__(self, positions: dict[fx.Node, int]) -> None:
        self._positions = positions
        self.schedule: str | None = None
        """The schedule to try next."""

    def places(self, component: Component) -> frozenset[int]:
        """The positions of a component's heads."""
        return frozenset(self._positions[h.node] for h in component.heads)

    def of(self, components: list[Component], rejection: Rejection) -> Refused:
        """These components are refused together."""
        return Refused(frozenset().union(*map(self.places, components)), rejection, self.schedule)

    def at(self, components: list[Component], node: fx.Node, rejection: Rejection) -> Refused:
        """The component of a node is refused."""
        component = next((c for c in components if node in c.nodes), components[0])
        rejection.bytes = rejection.bytes or component.logits_bytes
        return self.of([component], rejection)


def choose(
    components: list[Component], layouts: Layouts, settings: Settings, refusals: Refusals, left_alone: frozenset[int]
) -> list[Component]:
    """The components to rewrite; the layouts of all others are forgotten.  Raises Refused for one that is unwanted."""
    chosen: list[Component] = []
    real = [c for c in components if is_logits_like(c, layouts)]
    for component in components:
        places = refusals.places(component)
        if places & left_alone or component not in real or reads_another(component, real, layouts):
            layouts.drop(component.nodes)
            continue
        if (rejection := plan.reason_to_leave(component, settings, len(chosen))) is not None:
            raise refusals.of([component], rejection)
        chosen.append(component)
    return chosen


def put_in_place(
    builder: GraphBuilder,
    exits: list[Exit],
    calls: dict[int, dict[int, fx.Node]],
    chosen: list[Component],
    refusals: Refusals,
) -> None:
    """Replaces the exits by what the programs return, drops the regions and sorts what is left."""
    graph = builder.graph
    for exit in exits:
        replace(builder, exit, calls)
    drop_dead(graph)
    for node in effects(graph):
        if not is_functional(node):
            builder.output.prepend(node)  # writes to inputs come last, after all that the rewrite made reads them
    try:
        fxgraph.sort_topologically(graph)
    except AssertionError:
        message = (
            "values that are computed from the logits feed back into them, so that no program can come first; detach"
            " what feeds back, or compute it in a function of its own"
        )
        rejection = Rejection("LAYOUT", message, chosen[0].location, sum(c.logits_bytes for c in chosen))
        raise refusals.of(chosen, rejection) from None
    graph.lint()


MOST_LEFT_BEHIND = 3
"""Of the vocabulary-sized tensors that a rewritten graph still makes, so many are reported."""


def _stays(node: fx.Node) -> Rejection:
    message = (
        f"{op_name(node)} makes a tensor of tokens x vocabulary that is not computed row by row from the logits, so it"
        " stays; compute it from the logits alone, or pass it to the function as an argument"
    )
    return Rejection("NO_ROW_RULE", message, Location.of(node), nbytes(node), op_name(node))


def _replaced(old: fx.Node, new: Any, node: fx.Node) -> Any:
    return new if node is old else node


def _free_sizes(builder: GraphBuilder, layouts: Layouts) -> None:
    """Sizes that are read off a region's tensor are computed from the inputs' sizes instead."""
    for node in list(builder.graph.nodes):
        if isinstance(value(node), torch.SymInt) and any(layouts.is_wide(a) for a in node.all_input_nodes):
            dim = builder.dim(value(node))
            for user in list(node.users):
                user.args, user.kwargs = map_args(user, functools.partial(_replaced, node, dim))
    fxgraph.sort_topologically(builder.graph)


def find_exits(region: Region, refused: Any) -> list[Exit]:
    """Walks from the graph's outputs to the regions and writes a program's part for each exit on the way."""
    layouts, builder = region.layouts, region.builder
    original = set(builder.graph.nodes)
    exits: list[Exit] = []
    work = [builder.output, *effects(builder.graph)]
    seen = set(work)

    def need(nodes: Any) -> None:
        for node in nodes:
            if node not in seen:
                seen.add(node)
                work.append(node)

    while work:
        node = work.pop()
        if node.op == "placeholder":
            continue
        if layouts.is_wide(node):  # reached from outside of the region
            raise refused(node, _escape(region, node, seen))
        wide = [a for a in inputs_through_tuples(node) if layouts.is_wide(a)]
        if node not in original or not wide:
            need(node.all_input_nodes)
            continue
        try:
            exit = None if node.op == "output" or node in layouts.conflicts else make_exit(region, node)
            if exit is None:
                raise _no_exit(region, node, wide[0])
        except Rejection as rejection:
            raise refused(wide[0], rejection) from None
        exits.append(exit)
        need(_inputs(builder, region.drafts.values(), exit))
    return exits


def _inputs(builder: GraphBuilder, drafts: Iterable[Draft], exit: Exit) -> list[fx.Node]:
    """What the programs read; selections of rows are made now, so that what they depend on is visited too."""
    found: list[fx.Node | None] = []
    for draft in drafts:
        found += [r.map.rows_of(builder, r.node) for r in draft.row_inputs]
        found += [*draft.whole_inputs, *draft.sizes]
    for contribution in exit.contributions:
        found.append(contribution.path.positions(builder, value(exit.node).device))
        operand = contribution.draft.outputs[contribution.place].operand
        if isinstance(operand, RowInput):
            found.append(operand.map.rows_of(builder, operand.node))
        else:
            found.append(operand)
    return [node for node in found if node is not None]


def _escape(region: Region, node: fx.Node, seen: set[fx.Node]) -> Rejection:
    readers = [u for u in node.users if u in seen and not region.layouts.is_wide(u)]
    if not readers:
        message = (
            "a vocabulary-sized tensor is also needed whole by another part of the loss, which treats its rows"
            " together; compute that part from values a token"
        )
        return region.refuse(node, "MIXES_ROWS", message)
    output = next((u for u in readers if u.op == "output"), None)
    return _no_exit(region, output or readers[0], node)


def _no_exit(region: Region, node: fx.Node, wide: fx.Node) -> Rejection:
    if node.op == "output":
        return region.refuse(wide, "LOGITS_RETURNED", _leaves(region, wide))
    sends = [n for n in region.builder.graph.nodes if is_collective(n)]
    sends = [n for n in sends if any(region.layouts.is_wide(a) for a in n.all_input_nodes)]
    if sends:
        return region.refuse(sends[0], "NO_ROW_RULE", "{op} sends the logits to other ranks, so they have to exist")
    code, reason = "NO_ROW_RULE", "{op} reads the logits and is not known to treat each row apart"
    rule = RULES.get(node.target)
    if node in region.layouts.conflicts:
        code, reason = region.layouts.conflicts[node]
    elif isinstance(rule, (Reduction, Scan)) and not rule.is_local(region.layouts, node):
        code, reason = "MIXES_ROWS", "{op} runs over the rows of the logits, not over the vocabulary"
    return region.refuse(node if Location.of(node) else wide, code, reason)


def _leaves(region: Region, wide: fx.Node) -> str:
    if region.depths[wide] >= TANGENT_DEPTH:
        return (
            "the gradient of an input as large as the logits is asked for, so it has to exist; detach that input, or"
            " give it one value a token or one a vocabulary entry"
        )
    return (
        "the vocabulary-sized result of {op} is returned to the caller, so it has to exist; return a value a token"
        " (the log-prob of its label, the entropy) instead, or compile what reads it into the same function"
    )


def drop_dead(graph: fx.Graph) -> None:
    """Erases what neither the output nor an effect needs, in a graph that is not sorted yet."""
    needed = live(graph)
    dead = [n for n in graph.nodes if n not in needed and n.op != "placeholder"]
    for node in dead:
        node.args, node.kwargs = (), {}
    for node in dead:
        graph.erase_node(node)


def _is_product(contribution: Contribution) -> bool:
    return contribution.draft.outputs[contribution.place].operand is not None


def emit_calls(
    builder: GraphBuilder, drafts: list[Draft], exits: list[Exit], values: set[fx.Node], settings: Settings
) -> dict[int, dict[int, fx.Node]]:
    """One op call a program; by draft (id) and place, the node of each output that an exit uses.

    ``values``: what the user's forward computes, of which no product is filtered."""
    results: dict[int, dict[int, fx.Node]] = {}
    using = {id(d): sorted({c.place for e in exits for c in e.contributions if c.draft is d}) for d in drafts}
    drafts = sorted((d for d in drafts if using[id(d)]), key=lambda d: d.depth)
    takers = keep.plan_kept(builder, drafts, settings)
    for draft in drafts:
        used = using[id(draft)]
        program = draft.program(settings.accumulate, used)
        products = {e.node for e in exits for c in e.contributions if c.draft is draft and _is_product(c)}
        if products and not products & values:
            program = dataclasses.replace(program, filter_eps=settings.filter_eps)
        op, text, codegen = torch.ops.inductor_grpo.rows.default, program.to_text(), settings.codegen
        codegen += "+row_kernel" if row_kernel.wanted(settings.row_kernel, value(draft.origin).device.type) else ""
        if (tiled := plan.tiles(draft, used, program, settings)) is not None:
            tile_program, draft.patterns = tiled
            op, text, codegen = torch.ops.inductor_grpo.tiles.default, tile_program.to_text(), settings.codegen
        outputs = [draft.outputs[p] for p in used]
        gradients = draft.depth >= TANGENT_DEPTH or any(o.kind not in ("row", "total") for o in outputs)
        observe_body(draft.graph, [o.value for o in outputs], draft.patterns, gradients or draft.kept_rows != 0)
        rows = [r.map.rows_of(builder, r.node) for r in draft.row_inputs]
        n = builder.dim(numel(draft.rows))
        whole, sizes = list(draft.whole_inputs), list(draft.sizes)
        given = [rows, whole, n, sizes, text, settings.chunk_bytes or 0, codegen]
        if (unless := draft.unless) is not None:
            made = results[id(unless.forward)]
            ready = [made[unless.ready[place]] for place in used]
            flag = builder.getitem(node_arg(ready[0], 0), len(made))
            given = [ready, flag, unless.factor, unless.others, unless.forward.key, *given]
            op = torch.ops.inductor_grpo.rows_unless.default
        call = builder.call(op, *given)
        results[id(draft)] = {place: builder.getitem(call, i) for i, place in enumerate(used)}
        for taker, place, own in takers.get(id(draft), ()):
            taker.reuses.append((own, builder.getitem(call, len(used) + draft.keeps.index(place))))
    return results


def replace(builder: GraphBuilder, exit: Exit, calls: dict[int, dict[int, fx.Node]]) -> None:
    """Puts what the programs return in the place of an exit."""
    node, total = exit.node, None
    for contribution in exit.contributions:
        part = calls[id(contribution.draft)][contribution.place]
        if contribution.piece is not None and exit.kind not in ("outer", "outer_t", "total"):
            part = _cut_out(builder, part, contribution.piece)
        if exit.kind == "contract":
            part = _land(builder, part, contribution, numel(exit.rows))
        total = part if total is None else builder.call(aten.add.Tensor, total, part)
    if total is None:
        result = builder.full(shape(node), 0, value(node).dtype, value(node).device)
    else:
        result = exit.finish(builder, total)
    node.replace_all_uses_with(result)
    result.meta.setdefault("stack_trace", node.meta.get("stack_trace"))


def _cut_out(builder: GraphBuilder, part: fx.Node, piece: Piece) -> fx.Node:
    columns = shape(part)[-1]
    whole = builder.view(part, [*piece.rows, columns])
    cut = builder.slice(whole, piece.dim, piece.start, piece.start + piece.length)
    return builder.view(cut, [numel(shape(cut)[:-1]), columns])


def _land(builder: GraphBuilder, part: fx.Node, contribution: Contribution, rows: Any) -> fx.Node:
    """The gradient of selected rows, in the place of those rows."""
    if contribution.path == RowMap():
        return part
    positions = contribution.path.positions(builder, value(part).device)
    zeros = builder.full([rows, shape(part)[-1]], 0, value(part).dtype, value(part).device)
    return builder.call(aten.index_put.default, zeros, [positions], part, contribution.adds)
