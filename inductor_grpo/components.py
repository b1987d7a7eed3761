"""The regions of a graph, grouped into components: what is rewritten together."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.fx as fx

from .depth import after_tangent
from .graph import aten, hint, is_tensor, nbytes, node_arg, numel, same_sizes, shape, target_of
from .heads import MATMULS, Head, weight_root
from .layout import Layouts
from .report import Location
from .rules import RULES, infer_layouts
from .rules.reductions import MULTIPLE, SPLITS, WHOLE, Reduction, reduced_dims


@dataclasses.dataclass
class Component:
    """Regions that touch each other; they are rewritten together or not at all."""

    heads: list[Head]
    nodes: set[fx.Node]

    @property
    def location(self) -> Location | None:
        """The line of the first head."""
        return Location.of(self.heads[0].node)

    @property
    def logits_bytes(self) -> int:
        """The largest tensor of each head's vocabulary that the graph makes, all heads together."""
        return sum(nbytes(h.node) for h in self.heads)


def find_components(graph: fx.Graph, layouts: Layouts, heads: list[Head], backward: set[fx.Node]) -> list[Component]:
    """Gives the regions their layouts and groups the heads that share one."""
    if not heads:
        return []
    layouts.vocabulary = min(hint(head.vocabulary) for head in heads)
    for head in heads:
        layouts.set(head.node, layouts.new_space(), head.vocab)
    _seed_gradients(graph, layouts, heads, backward)
    infer_layouts(layouts)
    parents: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parents.get(node, node) is not node:
            node = parents[node]
        return node

    members = {n for n in graph.nodes if n in layouts or n in layouts.conflicts or target_of(n) in MULTIPLE | SPLITS}
    for node in members:
        for a in node.all_input_nodes:
            if a in members and target_of(node) not in MATMULS:  # what a matmul makes is another region, or none
                parents[find(a)] = find(node)
    groups: dict[fx.Node, Component] = {}
    for head in heads:
        groups.setdefault(find(head.node), Component([], set())).heads.append(head)
    for node in members:
        if find(node) in groups:
            groups[find(node)].nodes.add(node)
        else:
            layouts.drop({node})
    return list(groups.values())


def _seed_gradients(graph: fx.Graph, layouts: Layouts, heads: list[Head], backward: set[fx.Node]) -> None:
    """The gradient of logits is what meets a head's weight in the backward; a loss that only gathers has no softmax
    that would link it to the head."""
    roots: dict[fx.Node, Head] = {}
    for head in heads:
        roots.setdefault(weight_root(head.weight), head)
    for node in graph.nodes:
        if target_of(node) is not aten.mm.default or node not in backward:
            continue
        a, b = node.args
        found = roots.get(weight_root(b)) or roots.get(weight_root(a))
        if found is None:
            continue
        d, vocab = (a, len(shape(a)) - 1) if roots.get(weight_root(b)) is found else (b, len(shape(b)) - 2)
        if d not in layouts and same_sizes([shape(d)[vocab]], [found.vocabulary]) and d in backward:
            layouts.set(d, layouts.new_space(), vocab)


def is_logits_like(component: Component, layouts: Layouts) -> bool:
    """Something reduces over the vocabulary what comes of the region, or keeps a head much wider than hidden: not just
    a wide layer of a network, whose activations go into the next matmul (three times as wide: queries, keys and
    values)."""
    if any(_is_reduced(head) for head in component.heads):
        return True
    much_wider = any(hint(h.vocabulary) > 3 * hint(h.inner) for h in component.heads)
    outside = {u for n in component.nodes if layouts.is_wide(n) for u in n.users if not layouts.is_wide(u)}
    return any(u in layouts or (much_wider and target_of(u) not in MATMULS) for u in outside)


def _is_reduced(head: Head) -> bool:
    """A reduction over V is reached from the head through tensors that have a dimension of that size."""
    columns, seen, work = hint(head.vocabulary), {head.node}, [head.node]
    elements = hint(numel(shape(head.node)))
    while work:
        node = work.pop()
        for user in node.users:
            rule = RULES.get(user.target)
            if isinstance(rule, Reduction) or user.target in WHOLE or user.target in MULTIPLE:
                if any(hint(shape(node)[d]) == columns for d in reduced_dims(user)):
                    return True
            for after in [user] if is_tensor(user) else user.users:
                if after in seen or not is_tensor(after):
                    continue
                if columns in map(hint, shape(after)) or hint(numel(shape(after))) == elements:
                    seen.add(after)
                    work.append(after)
    return False


def reads_another(component: Component, real: list[Component], layouts: Layouts) -> bool:
    """Its heads multiply what another region's logits gave: they are that region's gradients, not heads."""
    others = [c for c in real if c is not component]
    operands = [x for head in component.heads for x in (head.hidden, head.weight)]
    return any(x in c.nodes and layouts.is_wide(x) for x in operands for c in others)


def left_behind(graph: fx.Graph, components: list[Component], known: set[fx.Node]) -> list[fx.Node]:
    """The tensors of tokens x vocabulary that a rewritten graph still makes: they do not come row by row from the
    logits.  Those of ``known`` have a rejection already."""
    found = []
    for component in components:
        head = component.heads[0]
        columns = hint(head.vocabulary)
        rows = hint(numel(shape(head.node))) // max(1, columns)
        if rows in (0, 1, hint(head.inner)):
            continue  # not to be told from a weight, or nothing
        for node in graph.nodes:
            made = (
                is_tensor(node)
                and node.op == "call_function"
                and node.users
                and node not in known
                and not _is_view(node)
            )
            if made and columns in (sizes := list(map(hint, shape(node)))):
                sizes.remove(columns)
                if math.prod(sizes) == rows and node not in found:
                    found.append(node)
    return found


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.is_view or node.target is aten.reshape.default
    )


def given_logits(graph: fx.Graph, least_bytes: int) -> fx.Node | None:
    """A softmax or logsumexp over the last dimension of an input of at least ``least_bytes``: the logits were made
    elsewhere.  Returns the node that starts it."""
    for node in graph.nodes:
        if target_of(node) is not aten.amax.default or not is_tensor(node):
            continue
        source = node_arg(node, 0)
        last = len(shape(source)) - 1
        if last < 1 or reduced_dims(node) != [last]:
            continue
        while source.op == "call_function" and len(tensors := [a for a in source.all_input_nodes if is_tensor(a)]) == 1:
            source = tensors[0]
        if source.op == "placeholder" and nbytes(source) >= max(1, least_bytes):
            return node
    return None


def largest_product(graph: fx.Graph, least_bytes: int) -> fx.Node | None:
    """The largest forward product of at least ``least_bytes`` at least as wide as what it sums over: what could be
    logits in a graph without a head."""
    backward = after_tangent(graph)
    found: fx.Node | None = None
    for node in graph.nodes:
        if target_of(node) not in _PRODUCTS or node in backward or not is_tensor(node):
            continue
        left, size = node_arg(node, _PRODUCTS[target_of(node)]), nbytes(node)
        if hint(shape(node)[-1]) >= hint(shape(left)[-1]) and size >= max(1, least_bytes):
            found = node if found is None or size > nbytes(found) else found
    return found


_PRODUCTS = {**MATMULS, aten.bmm.default: 0, aten.baddbmm.default: 1}
