"""The sums per segment of a graph, in all their spellings.

``index_add``, ``scatter_add``, ``index_put(accumulate=True)`` and ``scatter_reduce`` into a buffer with one value a
segment are one thing: values, ids, a count, and what the buffer held before.  By the time that the pass runs,
``index_add`` has become ``index_put``; ``original_aten`` tells them apart, which matters for negative ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from ..graph import Size, arg, args_of, aten, hint, is_one, is_tensor, prims, same, same_sizes, shape, target_of, value

_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
)
"""What keeps the elements and their order."""

_INTEGERS = (torch.int64, torch.int32)


@dataclasses.dataclass
class Ids:
    """Segment ids, ``[N]`` or any shape in the order of the tokens.

    With ``columns`` the ids are ``sizes`` = ``[rows, width]`` and count within their row: segment ``(row, id)`` is
    number ``row * columns + id``.
    """

    node: fx.Node
    columns: Size | None = None
    sizes: tuple[Size, ...] = ()

    def same_as(self, other: Ids) -> bool:
        """The same ids in the same numbering."""
        if self.columns is None or other.columns is None:
            return self.node is other.node and self.columns is other.columns
        return self.node is other.node and same(self.columns, other.columns) and same_sizes(self.sizes, other.sizes)


@dataclasses.dataclass
class Sum:
    """``node`` is ``base`` plus the sums of ``values`` over the tokens of each segment.

    ``count``   the number of segments
    ``alpha``   a factor of all sums
    ``mean``    None, or for scatter_reduce's mean whether the buffer counts as one more element
    ``wraps``   negative ids count from the end
    """

    node: fx.Node
    values: fx.Node
    ids: Ids
    count: Size
    base: fx.Node | None
    mean: bool | None = None
    wraps: bool = False
    alpha: float = 1


def through_views(node: fx.Node) -> fx.Node:
    """The tensor whose elements ``node`` shows in the same order."""
    while target_of(node) in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` shows the elements of its first input in the same order."""
    return target_of(node) in _VIEWS


def ids_of(node: fx.Node) -> fx.Node:
    """The ids themselves, without reshapes and integer casts that keep their values."""
    while True:
        node = through_views(node)
        if target_of(node) is not prims.convert_element_type.default:
            return node
        source = node.all_input_nodes[0]
        wider = value(node).dtype in _INTEGERS and value(source).dtype in _INTEGERS
        if not wider or value(node).dtype.itemsize < value(source).dtype.itemsize:
            return node
        node = source


def find_sums(graph: fx.Graph) -> list[Sum]:
    """All sums per segment of a graph, in its order."""
    found = (_sum_of(node) for node in graph.nodes if node.op == "call_function")
    return [s for s in found if s is not None]


def gathered(node: fx.Node) -> tuple[fx.Node, Ids, bool] | None:
    """For a read ``table[ids]`` of a value a segment: the table, the ids, and whether negative ids wrap."""
    target = target_of(node)
    if target is aten.index.Tensor:
        table, indices = args_of(node)
        if isinstance(table, fx.Node) and len(shape(table)) == 1 and _one_index(indices):
            return table, Ids(ids_of(indices[0])), True
    elif target in (aten.gather.default, aten.index_select.default):
        table, dim, index = args_of(node)[:3]
        rank = len(shape(table))
        if rank == 1:
            return table, Ids(ids_of(index)), False
        if rank == 2 and target is aten.gather.default and dim % 2 == 1 and same(shape(table)[0], shape(index)[0]):
            return table, Ids(ids_of(index), shape(table)[1], tuple(shape(index))), False
    return None


def is_zero(node: fx.Node) -> bool:
    """A constant zero, expanded or not."""
    while is_view(node) or target_of(node) in (aten.expand.default, prims.convert_element_type.default):
        node = node.all_input_nodes[0]
    if target_of(node) in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    place = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}
    target = target_of(node)
    constant = args_of(node)[place[target]] if target in place else None
    return isinstance(constant, (int, float)) and constant == 0


def _one_index(indices: Any) -> bool:
    if not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return False
    return is_tensor(indices[0]) and value(indices[0]).dtype in _INTEGERS


def _sum_of(node: fx.Node) -> Sum | None:
    target = target_of(node)
    if is_tensor(node) and value(node).dtype.is_complex:
        return None
    if target is aten.index_put.default:
        return _from_index_put(node)
    if target is aten.index_add.default:
        return _from_index_add(node)
    if target in (aten.scatter_add.default, aten.scatter_reduce.two):
        return _from_scatter(node)
    return None


def _from_index_add(node: fx.Node) -> Sum | None:
    """Half precision keeps the operator whole."""
    base, dim, index, values = args_of(node)[:4]
    alpha: Any = node.kwargs.get("alpha", 1)
    if len(shape(base)) != 1 or dim not in (0, -1) or not isinstance(alpha, (int, float)):
        return None
    return Sum(node, values, Ids(ids_of(index)), shape(base)[0], _unless_zero(base), alpha=alpha)


def _from_index_put(node: fx.Node) -> Sum | None:
    base, indices, values = args_of(node)[:3]
    if not arg(node, 3, "accumulate", False) or not _one_index(indices) or len(shape(base)) != 1:
        return None
    wraps = getattr(node.meta.get("original_aten"), "overloadpacket", None) is not aten.index_add
    return Sum(node, values, Ids(ids_of(indices[0])), shape(base)[0], _unless_zero(base), wraps=wraps)


def _from_scatter(node: fx.Node) -> Sum | None:
    base, dim, index, values = args_of(node)[:4]
    sizes, rank = shape(index), len(shape(base))
    if value(index).dtype not in _INTEGERS or not is_tensor(values) or not same_sizes(sizes, shape(values)):
        return None
    mean = None
    if node.target is aten.scatter_reduce.two:
        reduce, include_self = arg(node, 4, "reduce"), arg(node, 5, "include_self", True)
        floating = value(base).dtype.is_floating_point
        if reduce == "mean" and floating:
            mean = include_self
        elif reduce != "sum" or not (include_self or is_zero(base)):
            return None
    if rank == 1:
        return Sum(node, values, Ids(ids_of(index)), shape(base)[0], _unless_zero(base), mean)
    if rank == 2 and dim % 2 == 1 and same(shape(base)[0], sizes[0]) and _is_turns(sizes[1], shape(base)[1]):
        rows, columns = shape(base)
        return Sum(node, values, Ids(ids_of(index), columns, tuple(sizes)), rows * columns, _unless_zero(base), mean)
    return None


def _is_turns(tokens: Size, columns: Size) -> bool:
    """Whether the columns of a row are segments of its tokens, rather than a vocabulary."""
    return not is_one(columns) and hint(columns) <= hint(tokens)


def _unless_zero(base: fx.Node) -> fx.Node | None:
    return None if is_zero(base) else base
