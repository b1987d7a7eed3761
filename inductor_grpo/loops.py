"""A loop over pieces of the logits' rows, written by the user, as one computation over all rows.

``torch.cat([f(z[a:b]), f(z[b:c]), ...])`` is ``f(z)`` when f treats each row apart, and so are ``torch.stack`` of a
loop over sequences, a buffer that is filled piece by piece, and their backwards, which add up gradients that are zero
outside of a piece.  The rows come back together here, before anything else looks at the graph: what was written to save
memory needs no loop to be streamed, and runs in one pass where the loop would not.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import sympy
import torch.fx as fx

from ._compat import fxgraph
from .depth import after_tangent, live
from .graph import GraphBuilder, Size, arg, aten, is_tensor, node_arg, same, same_sizes, shape, target_of
from .heads import Head
from .normalise import WRITES, undo_views
from .parts import VIEWS, Parts, Wholes


def join_loops(graph: fx.Graph, heads: Sequence[Head]) -> None:
    """Rewrites, in place, the loops over pieces of the logits of ``heads``."""
    if not any(target_of(n) is aten.cat.default or target_of(n) in WRITES for n in graph.nodes):
        return
    builder = GraphBuilder(graph, after_tangent(graph))
    loops = Loops(builder, _logits_like(heads))
    for node in list(graph.nodes):
        joined = loops.of_root(node)
        if joined is not None:
            node.replace_all_uses_with(joined)
    if loops.changed:
        fxgraph.sort_topologically(graph)
        loops.cut_out_again()
        undo_views(graph, VIEWS)
        fxgraph.sort_topologically(graph)
        graph.eliminate_dead_code()


def cuts_unknown_sizes(graph: fx.Graph) -> bool:
    """Whether the graph cuts a tensor whose size has no value into pieces at numbers: each piece may end early, so that
    nobody can tell that they are the whole."""
    cuts: collections.Counter[fx.Node] = collections.Counter()
    for node in graph.nodes:
        if target_of(node) is aten.slice.Tensor and any(_is_clamped(size) for size in shape(node)):
            cuts[node_arg(node, 0)] += 1
    return any(number > 1 for number in cuts.values())


def _is_clamped(size: Size) -> bool:
    if isinstance(size, int):
        return False
    return any(type(part).__name__ in ("Min", "Max") for part in sympy.preorder_traversal(size.node.expr))


def _logits_like(heads: Sequence[Head]) -> set[fx.Node]:
    """What is computed from logits and as wide as they are."""
    found: set[fx.Node] = set()
    for head in heads:
        work, seen = [head.node], {head.node}
        while work:
            node = work.pop()
            if is_tensor(node) and any(same(size, head.vocabulary) for size in shape(node)):
                found.add(node)
            fresh = [user for user in node.users if user not in seen]
            seen.update(fresh)
            work += fresh
    return found


class Loops:
    """Finds what the values of pieces are pieces of."""

    def __init__(self, builder: GraphBuilder, wide: set[fx.Node]) -> None:
        self.builder = builder
        self.wide = wide
        self.wholes = Wholes(builder, wide)
        self.changed = False

    def of_root(self, node: fx.Node) -> fx.Node | None:
        """What to put in the place of a node that puts pieces together; None where it does not, or where they are not
        alike."""
        target = target_of(node)
        if target is aten.cat.default:
            return self._joined(node.args[0], arg(node, 1, "dim", 0) % max(1, len(shape(node))))
        if target is aten.add.Tensor and not _continues(node, target):
            return self._sum_of_writes(node)
        if target in WRITES and not _continues(node, target):
            writes = []
            base = node
            while target_of(base) is target:
                writes.append(base)
                base = node_arg(base, 0)
            return self._written(writes)
        return None

    def cut_out_again(self) -> None:
        """What else reads a piece reads it from the whole."""
        needed = live(self.builder.graph)
        for parts, whole in self.wholes.known.items():
            if whole is None or whole not in needed or all(p is parts.nodes[0] for p in parts.nodes):
                continue
            at: Size = 0
            for place, (node, length) in enumerate(zip(parts.nodes, parts.lengths())):
                if node in needed and node is not whole and node.op == "call_function":
                    if parts.stacked:
                        piece = self.builder.call(aten.select.int, whole, 0, place)
                    else:
                        piece = self.builder.slice(whole, parts.dim, at, at + length)
                    if piece is not node:
                        node.replace_all_uses_with(piece)
                at = at + length

    # ------------------------------------------------------------ roots

    def _joined(self, nodes: Any, dim: int) -> fx.Node | None:
        if len(nodes) < 2 or any(len(shape(n)) != len(shape(nodes[0])) for n in nodes):
            return None
        joined = self._of_logits(Parts(tuple(nodes), dim))
        if joined is not None or not all(_same_shape(n, nodes[0]) for n in nodes):
            return joined
        rows = self._of_logits(Parts(tuple(nodes), 0, stacked=True))
        if rows is None:
            return None
        sizes = shape(nodes[0])
        moved = self.builder.permute(rows, [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)])
        return self.builder.view(moved, [*sizes[:dim], sizes[dim] * len(nodes), *sizes[dim + 1 :]])

    def _of_logits(self, parts: Parts) -> fx.Node | None:
        before = len(self.builder.graph.nodes)
        whole = self.wholes.of(parts)
        made_wide = whole is not None and (whole in self.wide or self._reads_wide(whole))
        if not made_wide or (len(self.builder.graph.nodes) == before and whole in parts.nodes):
            return None
        self.changed = True
        return whole

    def _reads_wide(self, whole: fx.Node) -> bool:
        wholes = {w for w in self.wholes.known.values() if w is not None}
        work, seen = [whole], {whole}
        while work:
            node = work.pop()
            if node in self.wide:
                return True
            fresh = [a for a in node.all_input_nodes if a in wholes and a not in seen]
            seen.update(fresh)
            work += fresh
        return False

    def _sum_of_writes(self, node: fx.Node) -> fx.Node | None:
        """A sum of gradients that are zero outside of their piece."""
        if node.kwargs:
            return None  # one of them times a number
        terms, work = [], [node]
        while work:
            term = work.pop()
            if term is node or (target_of(term) is aten.add.Tensor and len(term.users) == 1 and not term.kwargs):
                if not all(isinstance(a, fx.Node) and _same_shape(a, node) for a in term.args):
                    return None
                work += reversed([a for a in term.args if isinstance(a, fx.Node)])
            else:
                terms.append(term)
        writes = [t for t in terms if target_of(t) in WRITES and _is_zero(node_arg(t, 0))]
        whole = self._written(writes)
        if whole is None:
            return None
        for term in terms:
            if term not in writes:
                whole = self.builder.call(aten.add.Tensor, whole, term)
        return whole

    def _written(self, writes: list[fx.Node]) -> fx.Node | None:
        """Writes of parts that fill a buffer."""
        if len(writes) < 2:
            return None
        target = target_of(writes[0])
        sizes = shape(writes[0])
        dims = {arg(w, 2, "dim", 0) % len(sizes) for w in writes}
        if len(dims) != 1 or len({target_of(w) for w in writes}) != 1:
            return None
        dim = dims.pop()
        if target is aten.select_scatter.default:
            places = {arg(w, 3, "index"): node_arg(w, 1) for w in writes}
            if dim != 0 or sorted(map(repr, places)) != sorted(map(repr, range(len(writes)))):
                return None
            if not same(sizes[0], len(writes)):
                return None
            return self._of_logits(Parts(tuple(places[i] for i in range(len(writes))), 0, stacked=True))
        spans = {}
        for write in writes:
            start = arg(write, 3, "start") or 0
            if not isinstance(start, int) or start < 0 or arg(write, 5, "step", 1) != 1 or start in spans:
                return None
            spans[start] = node_arg(write, 1)
        at: Size = 0
        nodes = [spans[start] for start in sorted(spans)]
        for start in sorted(spans):
            if not same(at, start):
                return None
            at = at + shape(spans[start])[dim]
        return self._joined(nodes, dim) if same(at, sizes[dim]) else None


def _continues(node: fx.Node, target: Any) -> bool:
    """The node is only a step on the way to another that :meth:`Loops.of_root` looks at: a term of a sum, or the buffer
    into which the next piece is written.  What is written into a buffer was a whole before it was a piece."""
    if len(node.users) != 1 or target_of(user := next(iter(node.users))) is not target:
        return False
    return target not in WRITES or user.args[0] is node


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return bool(is_tensor(a)) and same_sizes(shape(a), shape(b))


def _is_zero(node: fx.Node) -> bool:
    return target_of(node) is aten.full.default and bool(node.args[1] == 0)
