"""Groups of rows: what a loss computes per sequence of a ``[B, T]`` batch, inside of a chunk program.

A sum over the last row dimensions leaves one value a group of ``T`` consecutive rows.  Where chunks are whole groups,
such a value is local to a chunk.  Its canonical form there is ``[n, 1]`` like that of a row value, repeated for each
row of its group, so that broadcasting it back to the rows is nothing and pointwise operations need no rules of their
own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from .graph import Size, aten, is_one, is_tensor, node_arg, numel, right_aligned, same, same_sizes, shape
from .layout import Group, Layouts
from .rules import RULES, infer_layouts, is_pointwise
from .rules.reductions import reduced_dims
from .rules.views import Identity, Permute, View

REDUCTIONS = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
    aten.prod.dim_int,
}  # fmt: skip


def infer_groups(graph: fx.Graph, layouts: Layouts, fits: Callable[[int, Size], bool]) -> set[fx.Node]:
    """Finds the values of groups, and the row values that they are broadcast to, from row values onwards.

    ``fits(space, length)`` says whether chunks of ``length`` rows are small enough.  Returns the nodes that have a
    layout now.
    """
    lengths: dict[int, Size] = {}
    found: set[fx.Node] = set()
    changed = True
    while changed:
        changed = False
        for node in graph.nodes:
            if node.op != "call_function" or not is_tensor(node) or node in layouts or layouts.group(node) is not None:
                continue
            if node in layouts.conflicts or (kind := _group_of(layouts, node)) is None:
                continue
            is_row, group = kind
            known = lengths.get(group.space)
            if (known is not None and not same(known, group.length)) or not fits(group.space, group.length):
                continue
            if known is not None:  # lengths that are known to be equal can be spelt in two ways
                group = group._replace(length=known)
            lengths[group.space] = group.length
            if is_row:
                layouts.set(node, group.space, None)
            else:
                layouts.set_group(node, group)
            found.add(node)
            changed = True
        before = layouts.nodes()
        infer_layouts(layouts)
        found |= layouts.nodes() - before
    return found


def _group_of(layouts: Layouts, node: fx.Node) -> tuple[bool, Group] | None:
    """Whether a node is a row value made of group values (True) or a group value (False), and its group."""
    target = node.target
    if target in REDUCTIONS:
        return _reduced(layouts, node)
    source = layouts.group(node.args[0] if node.args else None)
    if isinstance(RULES.get(target), (View, Identity)):
        return None if source is None else (False, source)
    if isinstance(RULES.get(target), Permute):
        if source is None or not Permute._keeps_rows(Permute.order(node), shape(node_arg(node, 0)), None):
            return None
        return False, source
    if target is not aten.expand.default and not is_pointwise(target):
        return None
    groups = [(a, group) for a in node.all_input_nodes if (group := layouts.group(a)) is not None]
    kinds = {_broadcast(shape(a), shape(node), group) for a, group in groups}
    if len(kinds) != 1 or None in kinds or any(group != groups[0][1] for _, group in groups):
        return None
    return kinds == {True}, groups[0][1]


def _reduced(layouts: Layouts, node: fx.Node) -> tuple[bool, Group] | None:
    x, dims = node_arg(node, 0), reduced_dims(node)
    sizes, layout = shape(x), layouts.get(x)
    real = [d for d, size in enumerate(sizes) if not is_one(size)]
    summed = [d for d in real if d in dims]
    if (source := layouts.group(x)) is not None:
        return None if summed else (False, source)
    if layout is None or layout.vocab is not None or not 0 < len(summed) < len(real):
        return None
    if summed != real[-len(summed) :]:
        return None
    return False, Group(layout.space, numel(sizes[d] for d in summed))


def _broadcast(sizes: list[Size], result: list[Size], group: Group) -> bool | None:
    """False: nothing is stretched; True: each group's value goes to each of its rows; None: anything else."""
    padded = right_aligned(sizes, len(result))
    if same_sizes(padded, result):
        return False
    stretched = [d for d, size in enumerate(result) if not same(padded[d], size)]
    real = [d for d, size in enumerate(result) if not is_one(size)]
    trailing = stretched == real[-len(stretched) :] and all(is_one(padded[d]) for d in stretched)
    return True if trailing and same(numel(result[d] for d in stretched), group.length) else None
