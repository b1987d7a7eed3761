"""Making few programs of many.

A loop over rows or chunks that the user wrote gives one program a piece, all with the same text: they become one
program over all of the rows.  Programs that project the same hidden rows become one, so that their logits are computed
once.  Terms of one gradient that end up in one program are added before the matmul.
"""

from __future__ import annotations

import dataclasses

import torch.fx as fx

from .draft import Draft, RowInput
from .exits import Contribution, Exit, Piece
from .graph import (
    GraphBuilder,
    Size,
    arg,
    aten,
    hint,
    is_tensor,
    node_arg,
    numel,
    prims,
    same,
    same_sizes,
    shape,
    target_of,
)
from .ops import unless
from .order import in_order
from .rowmap import RowMap, Step, partition
from .rules.selection import select_step, slice_step


def merge(builder: GraphBuilder, drafts: list[Draft], exits: list[Exit]) -> list[Draft]:
    """The programs that remain; the contributions of the exits are changed to point to them."""
    drafts = _join_loops(builder, drafts, exits)
    drafts = _share_projections(drafts, exits)
    seen: set[tuple[int, int]] = set()
    for exit in exits:
        _whole_again(exit, seen)
        _add_terms(exit)
    return drafts


def _join_loops(builder: GraphBuilder, drafts: list[Draft], exits: list[Exit]) -> list[Draft]:
    groups: dict[object, list[Draft]] = {}
    for draft in _comparable(drafts, exits):
        program = draft.program("float32").to_text()
        key = (
            draft.depth,
            program,
            tuple(draft.whole_inputs),
            tuple(draft.sizes),
            draft if draft.group != 1 else None,  # pieces of rows are no groups
            tuple(o.kind for o in draft.outputs),
        )
        groups.setdefault(key, []).append(draft)
    result = []
    for group in groups.values():
        if len(group) > 1 and _sums_meet(group, exits):
            result.append(_join(builder, group, exits))
        else:
            result += group
    return result


def _comparable(drafts: list[Draft], exits: list[Exit]) -> list[Draft]:
    """The programs, in the order of their values where there are several that may be pieces of one loop."""
    result = []
    for draft in drafts:
        alike = [d for d in drafts if d.depth == draft.depth and len(d.outputs) == len(draft.outputs)]
        if len(alike) == 1 or draft.group != 1:
            result.append(draft)
            continue
        ordered, places = in_order(draft)
        for contribution in _of(draft, exits):
            contribution.draft, contribution.place = ordered, places[contribution.place]
        result.append(ordered)
    return result


def _sums_meet(group: list[Draft], exits: list[Exit]) -> bool:
    """What the pieces sum over their rows (weight gradients) is only ever added up, so that one sum can stand for
    all."""
    for place, out in enumerate(group[0].outputs):
        if out.kind not in ("outer", "outer_t", "total"):
            continue
        nodes = {
            exit.node
            for draft in group
            for exit in exits
            for c in exit.contributions
            if (c.draft, c.place) == (draft, place)
        }
        if len({_end_of_sum(node) for node in nodes}) > 1:
            return False
    return True


_LINEAR = {aten.permute.default, aten.view.default, aten.reshape.default, aten.clone.default, aten.t.default}


def _end_of_sum(node: fx.Node) -> tuple[object, ...]:
    """The last addition that a value flows into by itself, and what happens to it on the way; its own when there is
    none."""
    way: list[object] = []
    end: tuple[object, ...] = (node,)
    while len(node.users) == 1:
        user = next(iter(node.users))
        if target_of(user) is aten.add.Tensor and not user.kwargs and len(set(user.all_input_nodes)) == 2:
            if not all(same_sizes(shape(a), shape(user)) for a in user.all_input_nodes):
                break
            end = (user, *way)
        elif (
            target_of(user) in _LINEAR
            or target_of(user) is prims.convert_element_type.default
            or _is_scaled(user, node)
        ):
            way.append((user.target, str(user.args[1:])))
        elif target_of(user) is unless and node in (user.args[0], user.args[3]):
            way.append((user.target, str(user.args[1:3])))
        else:
            break
        node = user
    return end


def _is_scaled(user: fx.Node, node: fx.Node) -> bool:
    """``user`` is ``node`` times a number (the tangent of a region that runs in one pass)."""
    factor = user.args[1] if len(user.args) > 1 else None
    return target_of(user) is aten.mul.Tensor and user.args[0] is node and is_tensor(factor) and shape(factor) == []


def _join(builder: GraphBuilder, group: list[Draft], exits: list[Exit]) -> Draft:
    inputs = [[_peel(builder, r) for r in draft.row_inputs] for draft in group]
    cut = _cut(inputs)
    if cut is not None:
        column, root, dim = cut
        order = sorted(range(len(group)), key=lambda i: _span(inputs[i][column])[0])
        group, inputs = [group[i] for i in order], [inputs[i] for i in order]
        joined = Draft(list(root), group[0].depth, group[0].origin)
        places = []
        for own in inputs:
            step = own[column].map.steps[0]
            assert step.span is not None
            places.append(Piece(root, dim, step.span.start, step.span.length, step))
    else:
        total: Size = 0
        places = []
        for draft in group:
            places.append(Piece((), 0, total, numel(draft.rows)))
            total = total + numel(draft.rows)
        joined = Draft([total], group[0].depth, group[0].origin)
        places = [dataclasses.replace(p, rows=(total,)) for p in places]
    rows = [_join_column(builder, list(column), places) for column in zip(*inputs)]
    new = joined.absorb(group[0], rows)
    for draft, place in zip(group, places):
        for contribution in _of(draft, exits):
            contribution.draft, contribution.place = joined, new[contribution.place]
            contribution.piece = place
    return joined


def _join_column(builder: GraphBuilder, column: list[RowInput], places: list[Piece]) -> RowInput:
    """One row input of the joined program: the tensor that the pieces cut, or the pieces put together in its order."""
    root, dim, node = places[0].rows, places[0].dim, column[0].node
    if all(
        r.node is node and r.map.steps[:1] == (p.step,) and r.map.steps[1:] == column[0].map.steps[1:]
        for r, p in zip(column, places)
    ):
        return RowInput(node, RowMap(column[0].map.steps[1:]))
    columns = shape(node)[-1]
    views = []
    for row, place in zip(column, places):
        sizes = [*root[:dim], place.length, *root[dim + 1 :], columns]
        views.append(builder.view(row.map.rows_of(builder, row.node), sizes))
    return RowInput(builder.view(builder.cat(views, dim), [numel(root), columns]), RowMap())


def _of(draft: Draft, exits: list[Exit]) -> list[Contribution]:
    return [c for exit in exits for c in exit.contributions if c.draft is draft]


def _span(row: RowInput) -> tuple[int, Size]:
    span = row.map.steps[0].span
    assert span is not None
    return hint(span.start), span.length


def _cut(inputs: list[list[RowInput]]) -> tuple[int, tuple[Size, ...], int] | None:
    """A row input of which the pieces read consecutive spans of one tensor; its place, its rows and the dimension
    cut."""
    for place, column in enumerate(zip(*inputs)):
        node = column[0].node
        maps = [r.map for r in column]
        if any(r.node is not node for r in column) or any(
            not m.steps or m.steps[1:] != maps[0].steps[1:] for m in maps
        ):
            continue
        root = maps[0].steps[0].parent
        dim = partition([m.steps[0] for m in maps], root)
        if dim is not None:
            return place, root, dim
    return None


def _peel(builder: GraphBuilder, row: RowInput) -> RowInput:
    """``rows(x[:, a:b].view(-1, H))`` as a selection of rows of x, so that pieces of one tensor are seen to be that."""
    if row.map.steps:
        return row
    node, rows = row.node, shape(row.node)[0]
    source = node.args[0] if target_of(node) in (aten.view.default, aten.reshape.default) else node
    if target_of(source) not in (aten.slice.Tensor, aten.select.int) or not isinstance(source, fx.Node):
        return row
    base = node_arg(source, 0)
    dim, sizes = arg(source, 1, "dim", 0) % len(shape(base)), shape(base)
    if (
        dim == len(sizes) - 1
        or len(sizes) < 2
        or not same(shape(source)[-1], shape(node)[-1])
        or not same(numel(shape(source)[:-1]), rows)
    ):
        return row
    parent = tuple(sizes[:-1])
    step: Step
    if source.target is aten.select.int:
        step = select_step(parent, dim, arg(source, 2, "index"))
    else:
        stride = arg(source, 4, "step", 1)
        step = slice_step(parent, dim, arg(source, 2, "start"), arg(source, 3, "end"), stride, shape(source)[dim])
    return RowInput(builder.view(base, [numel(parent), sizes[-1]]), RowMap((step,)))


def _share_projections(drafts: list[Draft], exits: list[Exit]) -> list[Draft]:
    result: list[Draft] = []
    for draft in sorted(drafts, key=lambda d: not d.projections):
        host = next((d for d in result if _shares(d, draft, exits)), None)
        if host is None:
            result.append(draft)
            continue
        new = host.absorb(draft)
        for contribution in _of(draft, exits):
            contribution.draft, contribution.place = host, new[contribution.place]
    return result


def _shares(a: Draft, b: Draft, exits: list[Exit]) -> bool:
    """The programs project the same rows, or one projects nothing and adds to a gradient of the other."""

    def heads(draft: Draft) -> set[tuple[RowInput, fx.Node]]:
        rows, whole = list(draft.row_inputs), list(draft.whole_inputs)
        return {(rows[p.hidden], whole[p.weight]) for p in draft.projections}

    if (
        a.depth != b.depth
        or (1 not in (a.group, b.group) and a.group != b.group)
        or not same_sizes([numel(a.rows)], [numel(b.rows)])
    ):
        return False
    if not b.projections:
        return any({id(a), id(b)} <= {id(c.draft) for c in exit.contributions} for exit in exits)
    return bool(heads(a) & heads(b))


def _whole_again(exit: Exit, seen: set[tuple[int, int]]) -> None:
    """Contributions that are all the pieces of one output, each in its own place, are that output; and the sum over the
    rows of a joined program is there once for all exits (the others are zero), not once a piece."""
    kept: list[Contribution] = []
    for contribution in exit.contributions:
        key = (id(contribution.draft), contribution.place)
        if contribution.piece is None:
            kept.append(contribution)
        elif exit.kind in ("outer", "outer_t", "total"):
            if key not in seen:
                kept.append(Contribution(contribution.draft, contribution.place))
        elif exit.kind == "contract" and _complete(exit, contribution):
            if not any(c.draft is contribution.draft and c.place == contribution.place for c in kept):
                rest = RowMap(contribution.path.steps[1:])
                kept.append(Contribution(contribution.draft, contribution.place, rest, contribution.adds))
        else:
            kept.append(contribution)
        seen.add(key)
    exit.contributions = kept


def _complete(exit: Exit, contribution: Contribution) -> bool:
    piece, rest = contribution.piece, contribution.path.steps[1:]
    mine = [c for c in exit.contributions if c.draft is contribution.draft and c.place == contribution.place]
    if piece is None or any(
        c.piece is None or c.piece.step is None or c.path.steps != (c.piece.step, *rest) for c in mine
    ):
        return False
    return partition([c.path.steps[0] for c in mine], piece.rows) is not None


def _add_terms(exit: Exit) -> None:
    """Terms over the same rows of one program are one term."""
    if exit.kind not in ("contract", "outer", "outer_t", "total"):
        return
    kept: list[Contribution] = []
    for contribution in exit.contributions:
        draft = contribution.draft
        out = draft.outputs[contribution.place]
        for other in kept:
            known = draft.outputs[other.place] if other.draft is draft else None
            alike = known is not None and (known.operand, known.casts, known.columns) == (
                out.operand,
                out.casts,
                out.columns,
            )
            if alike and contribution.path == other.path and not contribution.adds and known is not None:
                total = draft.call(aten.add.Tensor, known.value, out.value)
                other.place = draft.keep(dataclasses.replace(known, value=total))
                break
        else:
            kept.append(contribution)
    exit.contributions = kept
