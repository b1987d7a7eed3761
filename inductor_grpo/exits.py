"""Exits: the nodes that read the region and are not vocabulary-sized themselves.

A row value is written by its own rule.  A contraction over the vocabulary or over the rows (the gradients of hidden,
weight and bias) is linear in its vocabulary-sized operand, so that operand is first taken apart into terms, each with
its own rows: the gradient of ``logits[:, :-1]`` costs a matmul over those rows only, also where the model scaled or
capped all of the logits before they were sliced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.fx as fx

from .draft import Draft, Output, RowInput
from .emit import Emitter, Region
from .graph import (
    GraphBuilder,
    Size,
    ancestors,
    arg,
    aten,
    is_one,
    is_tensor,
    node_arg,
    prims,
    same_sizes,
    shape,
    target_of,
    value,
)
from .layout import aligned_rows
from .linear import is_linear
from .program import SinkKind
from .rowmap import RowMap, Step
from .rules import RULES, is_pointwise
from .rules.indexing import index_list, row_fill_vocab
from .rules.reductions import WHOLE, Reduction, reduced_dims
from .rules.selection import SelectionScatter, cat_dim, cat_parts, cat_steps, row_step_of_scatter
from .rules.views import Identity, Permute, View

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_BY_VOCABULARY: dict[Any, Any] = {
    aten.sum.default: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
    aten.max.default: aten.amax.default,
    aten.min.default: aten.amin.default,
    aten.any.default: aten.any.dim,
    aten.all.default: aten.all.dim,
    aten.any.dims: aten.any.dim,
    aten.all.dims: aten.all.dim,
}
"""For each reduction of a whole tensor, or of several dimensions, the same of one."""
_PARTIAL = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
}  # fmt: skip
"""Reductions of one dimension whose results can be reduced further."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the rows of a joined program: ``start : start + length`` along dimension ``dim`` of rows ``rows``.

    ``step`` is the selection of the piece, when the joined program runs over the rows that it selects from.
    """

    rows: tuple[Size, ...]
    dim: int
    start: Size
    length: Size
    step: Step | None = None


@dataclasses.dataclass
class Contribution:
    """One output of a draft that an exit is made of; ``path`` leads from its rows to the exit's, which are the draft's
    or, after programs were joined, the rows of ``piece``."""

    draft: Draft
    place: int
    path: RowMap = dataclasses.field(default_factory=RowMap)
    adds: bool = False
    """Rows may coincide, so they are added where they land."""
    piece: Piece | None = None


@dataclasses.dataclass
class Exit:
    """A node of the outer graph that the programs compute.

    ``kind`` is that of its outputs, ``rows`` the row sizes of the region there; ``finish`` takes the two-dimensional
    result to the shape of the node.
    """

    node: fx.Node
    kind: SinkKind
    rows: list[Size]
    contributions: list[Contribution]
    finish: Callable[[GraphBuilder, fx.Node], fx.Node]


@dataclasses.dataclass(frozen=True)
class Applied:
    """A pointwise operation that is linear in its operand ``of``, on the rows that so many steps of the path select."""

    node: fx.Node
    of: fx.Node
    steps: int


@dataclasses.dataclass(frozen=True)
class Term:
    """``node`` in its own rows, which ``path`` leads to the rows of the sum; converted by ``casts`` after summation.

    ``after`` is what is done with the value before it is summed, in the rows of ``node``."""

    node: fx.Node
    path: tuple[Step, ...] = ()
    casts: tuple[torch.dtype, ...] = ()
    adds: bool = False
    after: tuple[Applied | torch.dtype, ...] = ()


def make_exit(region: Region, node: fx.Node) -> Exit | None:
    """Writes the programs' part of an exit; None when no rule says how ``node`` reads the region."""
    layouts = region.layouts
    if node in layouts:
        e = region.emitter(node)
        columns = e.builder.dim(layouts.columns(node))
        place = e.draft.keep(Output("row", e.value(node, RowMap()), columns, value(node).dtype))
        return Exit(
            node, "row", layouts.rows(node), [Contribution(e.draft, place)], _row_shape(node, layouts[node].vocab)
        )
    if target_of(node) is aten.mm.default:
        return _contraction(region, node)
    if target_of(node) in WHOLE or (target_of(node) in RULES and isinstance(RULES[node.target], Reduction)):
        return _reduction(region, node)
    return None


def _row_shape(node: fx.Node, vocab: int | None) -> Callable[[GraphBuilder, fx.Node], fx.Node]:
    sizes = shape(node)

    def finish(b: GraphBuilder, result: fx.Node) -> fx.Node:
        if vocab is None:
            return b.view(result, sizes)
        rows = [size for d, size in enumerate(sizes) if d != vocab]
        return b.permute(b.view(result, [*rows, sizes[vocab]]), [*range(vocab), len(rows), *range(vocab, len(rows))])

    return finish


def _reduction(region: Region, node: fx.Node) -> Exit | None:
    x = node_arg(node, 0)
    layout = region.layouts[x]
    dims = reduced_dims(node)
    rows = [d for d, size in enumerate(shape(x)) if d != layout.vocab and not is_one(size)]
    if layout.vocab not in dims:
        if node.target is not aten.sum.dim_IntList or any(d not in dims for d in rows):
            return None
        dtype: Any = node.kwargs.get("dtype") or value(x).dtype
        found = [dataclasses.replace(t, casts=(*t.casts, dtype)) for t in terms(region, x)]
        return _sum(region, node, x, "total", None, found)
    by_vocabulary = _BY_VOCABULARY.get(node.target, node.target)
    if by_vocabulary not in _PARTIAL or (node.target in (aten.any.dim, aten.all.dim)):
        return None
    e = region.emitter(x)
    partial = Reduction.write(e, node, e.dense(x, RowMap()), by_vocabulary)
    place = e.draft.keep(Output("row", partial, 1, value(node).dtype))
    keeps = len(shape(node)) == len(shape(x)) and node.target not in WHOLE
    one_column = [1 if d == layout.vocab else size for d, size in enumerate(shape(x))]

    def finish(b: GraphBuilder, result: fx.Node) -> fx.Node:
        values = b.view(result, one_column)
        if node.target in WHOLE and node.target not in (aten.amax.default, aten.amin.default):
            return b.call(node.target, values, **node.kwargs)
        several = node.target if node.target in (aten.any.dims, aten.all.dims) else by_vocabulary
        return b.call(several, values, dims, keeps)

    return Exit(node, "row", region.layouts.rows(x), [Contribution(e.draft, place)], finish)


def _contraction(region: Region, node: fx.Node) -> Exit | None:
    a, b = node.args
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    layouts, builder = region.layouts, region.builder
    left, right = layouts.is_wide(a), layouts.is_wide(b)
    if left and right:
        return None
    wide = a if left else b
    vocab = layouts[wide].vocab
    contracts_vocabulary = vocab == len(shape(wide)) - (1 if left else 2)
    if contracts_vocabulary:  # d @ W, or W.T @ d.T
        weight = b if left else builder.permute(a, [1, 0])
        return _sum(region, node, wide, "contract", weight, terms(region, wide), transposed=not left)
    hidden = b if left else builder.permute(a, [1, 0])
    return _sum(region, node, wide, "outer" if left else "outer_t", hidden, terms(region, wide))


def _sum(
    region: Region,
    node: fx.Node,
    x: fx.Node,
    kind: SinkKind,
    operand: fx.Node | None,
    parts: list[Term],
    transposed: bool = False,
) -> Exit:
    rows, contributions = region.layouts.rows(x), []
    # The other operand may come later than the region's values: a tangent times what the forward has.
    others = [a for a in node.all_input_nodes if not region.layouts.is_wide(a)]
    dtype = torch.float32 if kind in ("outer", "outer_t") and _read_in_float32(node) else value(node).dtype
    depth = max(region.depths[x], *(region.depths[a] + (a in region.layouts) for a in others), 0)
    for term in parts:
        e = region.emitter(term.node, depth)
        path = RowMap(term.path)
        term_operand: RowInput | fx.Node | None = operand
        if operand is not None and kind in ("outer", "outer_t"):
            term_operand = RowInput(operand, path)
        columns = e.builder.dim(region.layouts.columns(term.node))
        out = Output(kind, _value(e, term), columns, dtype, term_operand, term.casts)
        contributions.append(Contribution(e.draft, e.draft.keep(out), path, term.adds))

    def finish(b: GraphBuilder, result: fx.Node) -> fx.Node:
        return b.view(b.permute(result, [1, 0]) if transposed else result, shape(node))

    return Exit(node, kind, rows, contributions, finish)


def _value(e: Emitter, term: Term) -> fx.Node:
    result = e.value(term.node, RowMap())
    for step in term.after:
        if isinstance(step, torch.dtype):
            result = e.call(prims.convert_element_type.default, result, step)
        else:
            result = e.applied(step.node, step.of, result, RowMap(term.path[: step.steps]))
    return result


def _read_in_float32(node: fx.Node) -> bool:
    """A sum in lower precision whose readers convert it to float32 again: it need not be rounded."""
    lower = value(node).device.type != "cpu" and value(node).dtype in (torch.bfloat16, torch.float16)
    return lower and all(
        target_of(user) is prims.convert_element_type.default and user.args[1] is torch.float32 for user in node.users
    )


def terms(region: Region, x: fx.Node) -> list[Term]:
    """A sum of scattered parts, taken apart; one term, ``x`` itself, where it is not such a sum."""
    layouts = region.layouts
    if x in layouts.conflicts or not layouts.is_wide(x):
        return [Term(x)]
    inner: Any = x.args[0] if x.args else None
    vocab = layouts[x].vocab
    assert vocab is not None
    rule = RULES.get(x.target)
    if isinstance(rule, (Identity, View)) or (
        isinstance(rule, Permute) and layouts.get(inner) == _same_space(region, x, inner)
    ):
        return terms(region, inner) if layouts.is_wide(inner) else [Term(x)]
    if x.target in _CASTS and layouts.is_wide(inner):
        found = terms(region, inner)
        return [dataclasses.replace(t, casts=(*t.casts, value(x).dtype)) for t in found]
    if isinstance(rule, SelectionScatter) and _is_zero(inner) and _along_rows(region, x):
        return _inside(region, node_arg(x, 1), row_step_of_scatter(region.emitter(x), x))
    if x.target is aten.cat.default and cat_dim(x) != vocab:
        parts = zip(cat_parts(x), cat_steps(region.emitter(x), x))
        return [t for part, step in parts if not _is_zero(part) for t in _inside(region, part, step)]
    if x.target is aten.index_put.default and _is_zero(inner) and row_fill_vocab(x, vocab) is not None:
        return _inside(region, node_arg(x, 2), rows_step(region, x), adds=bool(arg(x, 3, "accumulate", False)))
    if (
        x.target is aten.add.Tensor
        and not x.kwargs
        and all(layouts.is_wide(a) and same_sizes(shape(a), shape(x)) for a in x.args)
    ):
        found = [t for a in cast("tuple[fx.Node, ...]", x.args) for t in terms(region, a)]
        if any(t.path for t in found):
            return found
    for operand in x.all_input_nodes:
        if _passes_through(region, x, operand):
            found = terms(region, operand)
            if any(t.path for t in found) and (len(found) == 1 or not any(t.casts for t in found)):
                return [
                    dataclasses.replace(t, casts=(), after=(*t.after, *t.casts, Applied(x, operand, len(t.path))))
                    for t in found
                ]
    return [Term(x)]


def _passes_through(region: Region, x: fx.Node, operand: fx.Node) -> bool:
    """``x`` is a pointwise operation that gives zero in the rows where ``operand`` is zero.

    Its other operands are numbers, the same for all rows, or computed from the logits (a soft-cap): one from outside
    with a value a row, that may be 0 or infinite in rows that the loss does not read, keeps these rows."""
    layouts = region.layouts
    if not (
        is_pointwise(x.target)
        and layouts.is_wide(operand)
        and operand not in layouts.conflicts
        and same_sizes(shape(operand), shape(x))
        and is_linear(x, {operand})
    ):
        return False
    vocab, rank = layouts[x].vocab, len(shape(x))
    for a in x.all_input_nodes:
        if layouts.is_wide(a):
            if a is not operand and operand in ancestors([a]):
                return False
        elif is_tensor(a) and not all(map(is_one, aligned_rows(shape(a), rank, vocab))):
            return False
    return True


def _same_space(region: Region, x: fx.Node, inner: Any) -> Any:
    layout = region.layouts.get(inner)
    return layout if layout is not None and layout.space == region.layouts[x].space else object()


def _inside(region: Region, part: fx.Node, step: Step, adds: bool = False) -> list[Term]:
    if not region.layouts.is_wide(part):
        raise region.refuse(part, "LAYOUT", "a part of the gradient of the logits has no rows of its own")
    found = terms(region, part)
    return [dataclasses.replace(t, path=(*t.path, step), adds=t.adds or adds) for t in found]


def _along_rows(region: Region, x: fx.Node) -> bool:
    return arg(x, 2, "dim", 0) % len(shape(x)) != region.layouts[x].vocab


def _is_zero(x: Any) -> bool:
    return target_of(x) is aten.full.default and x.args[1] == 0


def rows_step(region: Region, x: fx.Node) -> Step:
    """The rows that an index_put writes."""
    vocab = region.layouts[x].vocab
    rows = [index for d, index in enumerate(index_list(x)) if d != vocab]
    while rows and rows[-1] is None:
        rows.pop()
    parent = tuple(region.layouts.rows(x))
    key = (*map(str, parent), "index", *(i.name if i is not None else None for i in rows))
    return Step(key, parent, lambda b, positions: b.call(aten.index.Tensor, positions, rows))
