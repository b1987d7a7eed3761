"""The one-pass schedule: a region's backward runs in its forward, on the same logits.

The backward is linear in the tangent of the loss.  Where that is one number, it is taken as 1 in a twin of the backward
from the tangent to the region's exits, and the gradients that leave the region are multiplied by the tangent
afterwards.  The twin depends on no tangent.  When all that it reads of the rest of the graph can be known before the
region runs, its depth is the region's own, so the engine writes forward and backward into one program, which runs chunk
by chunk: three matmuls instead of four.

Where the twin reads what is computed from the values of all rows (sums over packed sequences, over ranks), it is a
program of its own after the first.  That pays where the logits of all rows are one chunk: the first program keeps them,
and the second writes their gradient over them (:mod:`inductor_grpo.keep`).

Of several tangents the first number is taken to be the loss's.  The twin is the backward with all others zero, and the
backward itself stays beside it (:mod:`inductor_grpo.observed`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.fx as fx

from . import observed, plan
from ._compat import fxgraph
from .components import Component
from .config import Settings
from .depth import after_tangent, effects, is_tangent, node_depths
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
    same_sizes,
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
        twin.put_in_place(builder, layouts, factors[twin.tangent], settings)
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
    """A component's backward with its tangent taken as 1, and all others as 0."""

    def __init__(
        self,
        component: Component,
        tangent: fx.Node,
        others: list[fx.Node],
        of: dict[fx.Node, fx.Node],
        exits: list[fx.Node],
        late: set[fx.Node],
    ):
        self.component = component
        self.tangent = tangent
        self.others = others
        """The other tangents that its gradients depend on."""
        self.of = of
        """Nodes of the backward -> their twins."""
        self.exits = exits
        self._late = late

    def wide(self, layouts: Layouts) -> list[fx.Node]:
        """The vocabulary-sized nodes that the component's programs compute."""
        return [n for n in self.component.nodes if n not in self._late and layouts.is_wide(n)]

    def put_in_place(self, builder: GraphBuilder, layouts: Layouts, factor: fx.Node, settings: Settings) -> None:
        """What reads an exit reads its twin times the tangent, ``factor``."""
        if self.others:
            for exit in self.exits:
                observed.stand_in(builder, layouts, exit, self.of[exit], factor, self.others)
            return
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

    # What only the region reads is computed in it.
    outside = ancestors([builder.output, *effects(graph)], {n for n in graph.nodes if not layouts.is_wide(n)})
    exits = [n for n in graph.nodes if depends.get(n) and n in outside and reads_region(n)]
    tangents = frozenset().union(*(depends[n] for n in exits))
    tangent = next((n for n in graph.nodes if n in tangents and _is_number(n)), None)
    if tangent is None:
        return None
    if any(layouts.is_wide(n) and value(n).dtype == torch.float16 for n in component.nodes):
        return None  # a scaled loss keeps its gradients from underflowing, so the scale must be in them
    late = {n for n, found in depends.items() if found & tangents}
    if nonlinear(exits, late, tangents) is not None:
        return None
    copies = _Copies(builder, layouts, {n for n in late if tangent not in depends[n]})
    before = ancestors(exits, late)
    needed = [n for n in graph.nodes if n in before and n not in tangents]
    if not all(map(copies.can_be, needed)):
        return None
    copies.of[tangent] = builder.full(shape(tangent), 1, value(tangent).dtype, value(tangent).device)
    for node in [*needed, *exits]:
        twin = copies.get(node)
        if twin is not None and node in component.nodes:
            component.nodes.add(twin)
    others = [n for n in graph.nodes if n in tangents and n is not tangent]
    return _Twin(component, tangent, others, copies.of, exits, late)


class _Copies:
    """Copies of the nodes of a backward, ``of`` their originals; those in ``zero`` are zero."""

    def __init__(self, builder: GraphBuilder, layouts: Layouts, zero: set[fx.Node]) -> None:
        self.of: dict[fx.Node, fx.Node] = {}
        self._builder, self._layouts, self._zero = builder, layouts, zero
        self._prefixes = Prefixes(builder, layouts)

    def can_be(self, node: fx.Node) -> bool:
        """Whether a copy of a node needs no vocabulary-sized zeros."""
        if node in self._zero or self._other_term(node) is not None:
            return True
        return not any(a in self._zero and self._layouts.is_wide(a) for a in node.all_input_nodes)

    def get(self, node: fx.Node) -> fx.Node | None:
        """The copy of a node whose inputs have theirs; None of vocabulary-sized zeros."""
        if node in self.of:
            return self.of[node]
        if node in self._zero:
            if not self._layouts.is_wide(node):
                self.of[node] = self._builder.full(shape(node), 0, value(node).dtype, value(node).device)
            return self.of.get(node)
        term = self._other_term(node)
        self.of[node] = twin = self._made(node) if term is None else self.of.get(term, term)
        twin.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        if node in self._layouts:
            self._layouts.set(twin, *self._layouts[node])
        if node in self._layouts.conflicts:
            self._layouts.conflict(twin, *self._layouts.conflicts[node])
        return twin

    def _made(self, node: fx.Node) -> fx.Node:
        args, kwargs = map_args(node, lambda n: self.of.get(n, n))
        if node.target is aten.constant_pad_nd.default:
            padded = self._prefixes.padded(node, cast(fx.Node, args[0]))
            if padded is not None:
                return padded
        return self._builder.call(node.target, *args, **kwargs)

    def _other_term(self, node: fx.Node) -> fx.Node | None:
        """What a sum or a difference is without a term that is zero."""
        if target_of(node) not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
            return None
        first, second = node.args
        term, other = (first, second) if second in self._zero else (second, first)
        if other not in self._zero or term in self._zero or (term is second and node.target is aten.sub.Tensor):
            return None
        alike = is_tensor(term) and same_sizes(shape(term), shape(node)) and value(term).dtype == value(node).dtype
        return cast(fx.Node, term) if alike else None


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
