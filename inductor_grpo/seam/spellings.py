"""Other spellings of sums per segment, brought to one aggregation for each quantity.

*Columns*: several quantities stacked and aggregated as rows.  *One-hot*: a product with ``one_hot(ids)`` or with
``ids[:, None] == arange(count)``, which takes a tensor of tokens x segments.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx

from .._compat import fxgraph
from ..graph import (
    GraphBuilder,
    Size,
    arg,
    args_of,
    aten,
    hint,
    is_one,
    is_tensor,
    node_arg,
    prims,
    same,
    same_sizes,
    shape,
    target_of,
    value,
)
from .sums import through_views

MOST_COLUMNS = 8


def normalise_sums(graph: fx.Graph, late: set[fx.Node]) -> None:
    """Rewrites the other spellings in place."""
    found = [n for n in graph.nodes if _is_stacked(n)]
    contractions = [(n, c) for n in graph.nodes if (c := _contraction(n)) is not None]
    if not found and not contractions:
        return
    builder = GraphBuilder(graph, late)
    for node in found:
        _replace(node, _by_columns(builder, node))
    for node, contraction in contractions:
        _replace(node, builder.view(contraction.written(builder, value(node).dtype), shape(node)))
    fxgraph.sort_topologically(graph)
    graph.eliminate_dead_code()


def _replace(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    new.meta.setdefault("stack_trace", old.meta.get("stack_trace"))


# Columns ----------------------------------------------------------------------------------------------------


def _is_stacked(node: fx.Node) -> bool:
    target = target_of(node)
    if target is aten.index_put.default:
        base, indices, values = node.args[:3]
        index = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
        adds = arg(node, 3, "accumulate", False)
    elif target is aten.index_add.default:
        (base, _, index, values), adds = node.args[:4], node.args[1] == 0 and node.kwargs.get("alpha", 1) == 1
    else:
        return False
    if not adds or not is_tensor(index) or value(index).dtype not in (torch.int64, torch.int32):
        return False
    if len(shape(base)) != 2 or len(shape(index)) != 1 or len(shape(values)) != 2:
        return False
    columns = shape(base)[1]
    return isinstance(columns, int) and 0 < columns <= MOST_COLUMNS and same(columns, shape(values)[1])


def _by_columns(b: GraphBuilder, node: fx.Node) -> fx.Node:
    indexed = node.target is aten.index_put.default
    base, where, values = node_arg(node, 0), node.args[1 if indexed else 2], node_arg(node, 2 if indexed else 3)
    results = []
    for column in range(shape(base)[1]):
        into, source = _column(b, base, column), _column(b, values, column)
        if indexed:
            one = b.call(aten.index_put.default, into, list(where), source, True)  # type: ignore[arg-type]
        else:
            one = b.call(aten.index_add.default, into, 0, where, source)
        one.meta.setdefault("original_aten", node.meta.get("original_aten"))
        results.append(b.call(aten.unsqueeze.default, one, 1))
    return b.cat(results, 1)


def _column(b: GraphBuilder, x: fx.Node, column: int) -> fx.Node:
    """One column: the tensor that was stacked, where it is known."""
    if target_of(x) is aten.full.default:
        return b.full(shape(x)[:1], x.args[1], value(x).dtype, value(x).device)
    if target_of(x) is aten.cat.default and arg(x, 1, "dim", 0) in (1, -1):
        parts = args_of(x)[0]
        if all(is_one(shape(part)[1]) for part in parts):
            return b.view(parts[column], shape(x)[:1])
    return b.call(aten.select.int, x, 1, column)


# One-hot ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class OneHot:
    """``ids [N]`` spread over ``count`` columns; ``turned`` when it is stored ``[count, N]``."""

    ids: fx.Node
    count: Size
    turned: bool = False


@dataclasses.dataclass
class Contraction:
    """A product with a one-hot matrix, summed over its tokens (``per_segment``) or over its segments.

    ``operand`` has one element a token or a segment; None where the matrix alone is summed.
    """

    hot: OneHot
    operand: fx.Node | None
    per_segment: bool

    def written(self, b: GraphBuilder, dtype: torch.dtype) -> fx.Node:
        """The same as an aggregation, or as a read through the ids."""
        return self._sums(b, dtype) if self.per_segment else self._read(b, dtype)

    def _sums(self, b: GraphBuilder, dtype: torch.dtype) -> fx.Node:
        tokens, device = shape(self.hot.ids), value(self.hot.ids).device
        operand = b.full(tokens, 1, dtype, device) if self.operand is None else self._cast(b, self.operand, dtype)
        operand = b.view(operand, tokens)
        # Ids that are nowhere in the matrix go to one more segment, which is cut off.
        outside, inside = self._outside(b)
        nowhere = b.call(aten.where.self, outside, self._number(b, self.hot.count), inside)
        total = self._aggregate(b, nowhere, operand)
        if self.operand is None or not dtype.is_floating_point:
            return total
        # 0 * inf is nan: a value that is not finite spoils every segment but its own.
        spoilt = b.call(prims.convert_element_type.default, self._not_finite(b, operand), torch.float32)
        others = b.call(aten.sub.Tensor, b.call(aten.sum.default, spoilt), self._aggregate(b, nowhere, spoilt))
        return self._spoil(b, total, others)

    def _read(self, b: GraphBuilder, dtype: torch.dtype) -> fx.Node:
        outside, inside = self._outside(b)
        if self.operand is None:
            return b.call(prims.convert_element_type.default, b.call(aten.logical_not.default, outside), dtype)
        table = b.view(self._cast(b, self.operand, dtype), [self.hot.count])
        first = b.call(aten.where.self, outside, self._number(b, 0), inside)
        # With no segments there is nothing to read; with one more, element 0 always exists.
        zero = b.full([1], 0, value(table).dtype, value(table).device)
        read = b.call(aten.index.Tensor, b.cat([table, zero], 0), [first])
        read = b.call(aten.where.self, outside, b.full([], 0, value(read).dtype, value(read).device), read)
        if not dtype.is_floating_point:
            return read
        spoilt = b.call(prims.convert_element_type.default, self._not_finite(b, table), torch.float32)
        own = b.call(prims.convert_element_type.default, self._not_finite(b, read), torch.float32)
        return self._spoil(b, read, b.call(aten.sub.Tensor, b.call(aten.sum.default, spoilt), own))

    def _aggregate(self, b: GraphBuilder, ids: fx.Node, values: fx.Node) -> fx.Node:
        more = b.full([self.hot.count + 1], 0, value(values).dtype, value(values).device)
        total = b.call(aten.index_put.default, more, [ids], values, True)
        return b.slice(total, 0, 0, self.hot.count)

    def _outside(self, b: GraphBuilder) -> tuple[fx.Node, fx.Node]:
        ids = self.hot.ids
        low = b.call(aten.lt.Scalar, ids, 0)
        return b.call(aten.logical_or.default, low, b.call(aten.ge.Scalar, ids, b.dim(self.hot.count))), ids

    @staticmethod
    def _cast(b: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The operand in the dtype of the product: counts of a bool mask are integers."""
        return x if value(x).dtype == dtype else b.call(prims.convert_element_type.default, x, dtype)

    def _number(self, b: GraphBuilder, number: Size) -> fx.Node:
        ids = value(self.hot.ids)
        return b.full([], b.dim(number), ids.dtype, ids.device)

    @staticmethod
    def _not_finite(b: GraphBuilder, x: fx.Node) -> fx.Node:
        return b.call(aten.ne.Tensor, b.call(aten.sub.Tensor, x, x), b.full([], 0, value(x).dtype, value(x).device))

    @staticmethod
    def _spoil(b: GraphBuilder, x: fx.Node, others: fx.Node) -> fx.Node:
        nan = b.full([], float("nan"), value(x).dtype, value(x).device)
        return b.call(aten.where.self, b.call(aten.gt.Scalar, others, 0), nan, x)


def _contraction(node: fx.Node) -> Contraction | None:
    target = target_of(node)
    if target is aten.mm.default:
        return _from_mm(node)
    if target is aten.sum.dim_IntList and not node.kwargs:
        return _from_sum(node)
    return None


def _from_mm(node: fx.Node) -> Contraction | None:
    left, right = node_arg(node, 0), node_arg(node, 1)
    if is_one(shape(left)[0]) and (hot := _one_hot(right)) is not None:
        return Contraction(hot, left, per_segment=not hot.turned)
    if is_one(shape(right)[1]) and (hot := _one_hot(left)) is not None:
        return Contraction(hot, right, per_segment=hot.turned)
    return None


def _from_sum(node: fx.Node) -> Contraction | None:
    product, dims = node_arg(node, 0), args_of(node)[1]
    if len(shape(product)) != 2 or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    dim = dims[0] % 2
    if (hot := _one_hot(product)) is not None:
        return Contraction(hot, None, per_segment=(dim == 0) != hot.turned)
    if target_of(product) is not aten.mul.Tensor or not all(map(is_tensor, product.args)):
        return None
    for place in (0, 1):
        matrix = _one_hot(node_arg(product, place))
        other = node_arg(product, 1 - place)
        if matrix is None or not same_sizes(shape(node_arg(product, place)), shape(product)):
            continue
        # The operand varies along the summed dimension alone.
        while target_of(other) is aten.expand.default:
            other = node_arg(other, 0)
        flat = through_views(other)
        along = [s for s in shape(other) if not is_one(s)]
        summed = shape(product)[dim]
        rank = len(shape(other))
        lies = (rank == 1 and dim == 1) or (rank == 2 and is_one(shape(other)[1 - dim]))
        if lies and same_sizes(along or [1], [summed]):
            operand = flat if same_sizes(shape(flat), [summed]) else other
            return Contraction(matrix, operand, (dim == 0) != matrix.turned)
    return None


def _one_hot(node: fx.Node) -> OneHot | None:
    """The one-hot matrix that a node holds, in any dtype."""
    turned = False
    while True:
        if target_of(node) is aten.permute.default and len(shape(node)) == 2:
            turned = not turned if list(node.args[1]) in ([1, 0], [-1, 0], [1, -2]) else turned  # type: ignore[arg-type]
        elif target_of(node) not in (prims.convert_element_type.default, aten.clone.default):
            break
        node = node_arg(node, 0)
    if target_of(node) is not aten.eq.Tensor or len(shape(node)) != 2:
        return None
    for place in (0, 1):
        ids, numbers = node_arg(node, place), node_arg(node, 1 - place)
        if not (is_tensor(ids) and is_tensor(numbers)):
            continue
        source = through_views(numbers)
        counts_up = target_of(source) is prims.iota.default and source.kwargs.get("step") == 1
        counts_up = counts_up and source.kwargs.get("start") == 0
        count, tokens = shape(node)[1], shape(node)[0]
        is_column = len(shape(ids)) == 2 and is_one(shape(ids)[1]) and same(shape(ids)[0], tokens)
        if counts_up and is_column and same_sizes(shape(numbers)[-1:], [count]) and hint(tokens) >= hint(count):
            flat = through_views(ids)
            if value(flat).dtype in (torch.int64, torch.int32) and same_sizes(shape(flat), [tokens]):
                return OneHot(flat, count, turned)
    return None
