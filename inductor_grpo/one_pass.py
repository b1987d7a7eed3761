"""The one-pass schedule: a region's backward runs in its forward, on the same logits.

The backward is linear in the tangent of the loss.  Where that is one number, it is taken as 1 in a twin of the backward
from the tangent to the region's exits, and the gradients that leave the region are multiplied by the tangent
afterwards.  The twin depends on no tangent.  When all that it reads of the rest of the graph can be known before the
region runs, its depth is the region's own, so the engine writes forward and backward into one program, which runs chunk
by chunk: three matmuls instead of four.

Where the twin reads what is computed from the values of all rows (sums over packed sequences, over ranks), it is a
program of its own after the first.  That pays where the logits of all rows are one chunk: the first program keeps them,
and the second writes their gradient over them (:mod:`inductor_grpo.keep`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.fx as fx

from . import plan
from ._compat import fxgraph
from .components import Component
from .config import Settings
from .depth import after_tangent, is_tangent, node_depths
from .graph import (
    GraphBuilder,
    Size,
    ancestors,
    aten,
    inputs_through_tuples,
    is_one,
    is_tensor,
    map_args,
    numel,
    prims,
    same,
    shape,
    target_of,
    value,
)
from .groups import infer_groups
from .layout import Layouts
from .linear import dependents, nonlinear
from .prefix import Prefixes
from .rules import RULES, is_pointwise
from .rules.views import Identity, View


def one_pass(
    builder: GraphBuilder, layouts: Layouts, components: list[Component], settings: Settings
) -> dict[fx.Node, int]:
    """Rewrites the backward of every component that can run in one pass, in place.

    Returns the depth from which on the vocabulary-sized nodes of each such component are computed: what their backward
    reads (another model's log-probs) must be there before.  Components that cannot are left as they are (two-pass); if
    it is all of them, the result is empty.
    """
    twins = [t for c in components if (t := _twin(builder, layouts, c)) is not None]
    trained = {layouts[n].space for t in twins for n in t.of.values() if layouts.is_wide(n)}
    _take_over_bridges(builder.graph, layouts, trained)

    def fits(space: int, length: Size) -> bool:
        owners = [t.component for t in twins if any(layouts[n].space == space for n in t.wide(layouts))]
        heads = [h for component in owners for h in component.heads]
        return bool(heads) and all(plan.group_fits(h, length, settings) for h in heads)

    grouped = infer_groups(builder.graph, layouts, fits)
    floors: dict[fx.Node, int] = {}
    done: list[_Twin] = []
    groups = [twins] if _floors(builder.graph, layouts, twins) is not None else [[t] for t in twins]
    for group in groups:
        found = _floors(builder.graph, layouts, [*done, *group]) if group else None
        if found is not None:
            floors, done = found, [*done, *group]
    mine = {layouts[n].space for twin in done for n in twin.wide(layouts)}
    layouts.drop({n for n in grouped if layouts.space_of(n) not in mine})
    late = [t for t in twins if t not in done and plan.is_one_chunk(t.component, settings)]
    late = late if _hold_in_forward(builder, late) else []
    both = [*done, *late]
    factors = {t.tangent: _factor(builder, [other for other in both if other.tangent is t.tangent]) for t in both}
    for twin in both:
        twin.put_in_place(builder, factors[twin.tangent], settings)
    if late:
        fxgraph.sort_topologically(builder.graph)
    for twin in late:
        depths = node_depths(builder.graph, layouts, floors)
        gradients = [copy for copy in twin.of.values() if layouts.is_wide(copy)]
        floors.update(dict.fromkeys(gradients, max(depths[copy] for copy in gradients)))
    return floors


def _hold_in_forward(builder: GraphBuilder, twins: list[_Twin]) -> bool:
    """Lets an output of the forward wait for the gradients of these components; whether there is one."""
    if not twins:
        return False
    outputs, late = list(builder.output.args[0]), after_tangent(builder.graph)
    for place, node in enumerate(outputs):
        if not isinstance(node, fx.Node) or node.op == "placeholder" or node in late or not is_tensor(node):
            continue
        if is_one(numel(shape(node))):
            gradients = [twin.of[exit] for twin in twins for exit in twin.exits]
            outputs[place] = builder.call(torch.ops.inductor_grpo.after.default, node, gradients)
            builder.output.args = (tuple(outputs),)
            return True
    return False


def _factor(builder: GraphBuilder, twins: list[_Twin]) -> fx.Node:
    """The tangent of some components as a number.

    A second derivative is refused by torch where the backward has an input that requires a gradient, as any other
    schedule's has: so this has all that their gradients are computed from."""
    before = ancestors([exit for twin in twins for exit in twin.exits])
    kept = [n for n in builder.graph.nodes if n.op == "placeholder" and n in before and _may_have_gradient(n)]
    return builder.call(torch.ops.inductor_grpo.tangent.default, builder.view(twins[0].tangent, []), kept)


class _Twin:
    """A component's backward with its tangent taken as 1."""

    def __init__(self, component: Component, tangent: fx.Node, of: dict[fx.Node, fx.Node], exits: list[fx.Node]):
        self.component = component
        self.tangent = tangent
        self.of = of
        """Nodes of the backward -> their twins."""
        self.exits = exits

    def wide(self, layouts: Layouts) -> list[fx.Node]:
        """The vocabulary-sized nodes that the component's programs compute."""
        return [n for n in self.component.nodes if n not in self.of and layouts.is_wide(n)]

    def put_in_place(self, builder: GraphBuilder, factor: fx.Node, settings: Settings) -> None:
        """What reads an exit reads its twin times the tangent, ``factor``."""
        keeps_sums = plan.keeps_sums(self.component, settings)
        for exit in self.exits:
            scaled, dtype = self.of[exit], value(exit).dtype
            if keeps_sums and self._is_sum_of_rows(exit) and dtype.itemsize < 4:
                # Rounded once, after the product: the chunks' sum is float32 anyway.
                scaled = builder.call(prims.convert_element_type.default, scaled, torch.float32)
            scaled = builder.call(aten.mul.Tensor, scaled, factor)
            if value(scaled).dtype != dtype:
                scaled = builder.call(prims.convert_element_type.default, scaled, dtype)
            exit.replace_all_uses_with(scaled)

    def _is_sum_of_rows(self, exit: fx.Node) -> bool:
        rows = {str(numel(shape(h.hidden)[:1] if h.vocab else shape(h.hidden)[1:])) for h in self.component.heads}
        return target_of(exit) is aten.mm.default and str(shape(exit.args[0])[1]) in rows


def _twin(builder: GraphBuilder, layouts: Layouts, component: Component) -> _Twin | None:
    graph = builder.graph
    depends = dependents(graph, is_tangent)

    def reads_region(node: fx.Node) -> bool:
        return any(a in component.nodes and layouts.is_wide(a) for a in inputs_through_tuples(node))

    exits = [n for n in graph.nodes if depends.get(n) and not layouts.is_wide(n) and reads_region(n)]
    tangents = frozenset().union(*(depends[n] for n in exits))
    if len(tangents) != 1 or not _is_number(tangent := next(iter(tangents))):
        return None
    if any(layouts.is_wide(n) and value(n).dtype == torch.float16 for n in component.nodes):
        return None  # a scaled loss keeps its gradients from underflowing, so the scale must be in them
    late = {n for n, found in depends.items() if tangent in found}
    if nonlinear(exits, late, tangent) is not None:
        return None
    one = builder.full(shape(tangent), 1, value(tangent).dtype, value(tangent).device)
    of = {tangent: one}
    needed, prefixes = ancestors(exits, late), Prefixes(builder, layouts)
    for node in list(graph.nodes):
        if node not in needed or node is tangent:
            continue
        args, kwargs = map_args(node, lambda n: of.get(n, n))
        twin = prefixes.padded(node, cast(fx.Node, args[0])) if node.target is aten.constant_pad_nd.default else None
        of[node] = twin = twin or builder.call(node.target, *args, **kwargs)
        twin.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        if node in layouts:
            layouts.set(twin, *layouts[node])
        if node in layouts.conflicts:
            layouts.conflict(twin, *layouts.conflicts[node])
        if node in component.nodes:
            component.nodes.add(twin)
    return _Twin(component, tangent, of, exits)


def _is_number(tangent: fx.Node) -> bool:
    return is_one(numel(shape(tangent))) and value(tangent).is_floating_point()


def _may_have_gradient(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).is_floating_point() and not is_tangent(node)


def _take_over_bridges(graph: fx.Graph, layouts: Layouts, trained: set[int]) -> None:
    """Row values that combine a trained head's row values with another's (a KL term) are computed with the trained
    head's; where both are trained, their rows are one row space."""
    for node in graph.nodes:
        own = layouts.get(node)
        if own is None or own.vocab is not None or not _keeps_rows(node):
            continue
        for a in node.all_input_nodes:
            other = layouts.get(a)
            if other is None or other.vocab is not None or not same(numel(shape(a)), numel(shape(node))):
                continue
            space = layouts[node].space
            if other.space != space and other.space in trained:
                if space in trained:
                    layouts.unite(space, other.space)
                    trained.add(layouts.find(space))
                else:
                    layouts.move(node, other.space)


def _keeps_rows(node: fx.Node) -> bool:
    return is_pointwise(node.target) or isinstance(RULES.get(node.target), (Identity, View))


def _floors(graph: fx.Graph, layouts: Layouts, twins: list[_Twin]) -> dict[fx.Node, int] | None:
    """The least depths with which the programs of every row space run at one depth; None when there are none, because
    a backward reads something that is computed from what its own region returns."""
    spaces: dict[int, list[fx.Node]] = {}
    for twin in twins:
        for node in twin.wide(layouts):
            spaces.setdefault(layouts[node].space, []).append(node)
    floors: dict[fx.Node, int] = {}
    for _ in range(len(spaces) + 1):
        depths = node_depths(graph, layouts, floors)
        settled = True
        for wide in spaces.values():
            level = max(depths[n] for n in wide)
            settled = settled and all(depths[n] == level for n in wide)
            floors.update(dict.fromkeys(wide, level))
        if settled:
            return floors
    return None
