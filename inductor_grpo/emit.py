"""Writing region nodes into chunk programs, in canonical two-dimensional form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.fx as fx

from .capture import tried
from .cures import cure
from .depth import TANGENT_DEPTH
from .draft import Draft
from .graph import (
    GraphBuilder,
    Size,
    aten,
    inputs_through_tuples,
    is_one,
    is_tensor,
    node_arg,
    numel,
    prims,
    right_aligned,
    same_sizes,
    shape,
    target_of,
    value,
)
from .heads import Head
from .layout import Layouts, aligned_rows
from .program import Projection
from .report import Location, Rejection, op_name
from .rowmap import RowMap, Step


class Region:
    """What the emitters of all programs share: the graph, its layouts, depths and heads, and the programs so far."""

    def __init__(self, builder: GraphBuilder, layouts: Layouts, depths: dict[fx.Node, int], heads: dict[fx.Node, Head]):
        self.builder = builder
        self.layouts = layouts
        self.depths = depths
        self.heads = heads
        self.drafts: dict[tuple[int, int], Draft] = {}
        self._from_logits: dict[fx.Node, bool] = {}

    def emitter(self, node: fx.Node, depth: int | None = None) -> Emitter:
        """The emitter for the row space of a node, at its depth or a later one."""
        key = (self.layouts[node].space, self.depths[node] if depth is None else depth)
        if key not in self.drafts:
            self.drafts[key] = Draft(self.layouts.rows(node), key[1], node)
        return Emitter(self, self.drafts[key])

    def comes_from_logits(self, node: fx.Node) -> bool:
        """A row value that is computed from vocabulary-sized values of its own depth; others come from outside, ready
        made."""
        if node not in self._from_logits:
            self._from_logits[node] = False
            sources = [
                a
                for a in inputs_through_tuples(node)
                if self.layouts.space_of(a) is not None and self.depths[a] == self.depths[node]
            ]
            self._from_logits[node] = any(self.layouts.is_wide(a) or self.comes_from_logits(a) for a in sources)
        return self._from_logits[node]

    def refuse(self, node: fx.Node, code: str, message: str) -> Rejection:
        """A rejection that names the user's line of a node; in the message ``{op}`` stands for the operation, and one
        without a cure gets that of its code."""
        op = op_name(self._forward(_behind_views(node) if code == "LOGITS_RETURNED" else node))
        message = message if "; " in message else f"{message}; {cure(code, op)}"
        message = message.replace("{op}", op)
        return Rejection(code, message, Location.of(node), op=op)

    def _forward(self, node: fx.Node) -> fx.Node:
        """The operation that a node of the backward differentiates, which is the one that the user wrote."""
        number = node.meta.get("seq_nr")
        if self.depths.get(node, 0) < TANGENT_DEPTH or number is None:
            return node
        made = [n for n in self.builder.graph.nodes if n.meta.get("seq_nr") == number and n.op == "call_function"]
        reads = [n for n in made if any(self.layouts.is_wide(a) for a in n.all_input_nodes)]
        return next((n for n in reversed(reads) if self.depths.get(n, 0) < TANGENT_DEPTH), node)


def _behind_views(node: fx.Node) -> fx.Node:
    """What made the values that a view shows."""
    while isinstance(node.target, torch._ops.OpOverload) and (
        node.target.is_view or node.target in (aten.reshape.default, aten._unsafe_view.default)
    ):
        node = node_arg(node, 0)
    return node


class Emitter:
    """Writes values into one draft.  Rules call its methods; ``rowmap`` leads from the draft's rows to those of a
    node."""

    def __init__(self, region: Region, draft: Draft) -> None:
        self.region = region
        self.draft = draft
        self.layouts = region.layouts
        self.builder = region.builder
        self._recomputes = False
        self._group: Size | None = None
        """Rows of a group, while a value of groups is written."""

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, row values of an earlier depth that come from the logits are computed again from this program's
        logits.

        A comparison needs that: the backward's logits may differ from the forward's in the last bit (their matmul had
        another number of rows), and ``z == z.amax()`` must still hold somewhere."""
        before, self._recomputes = self._recomputes, True
        try:
            yield
        finally:
            self._recomputes = before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the body."""
        return self.draft.call(target, *args, **kwargs)

    def value(self, node: fx.Node, rowmap: RowMap) -> fx.Node:
        """The body's value of a region node; raises Rejection where no rule can write it."""
        from .rules import rule_of

        key = (node, rowmap, self._recomputes)
        if key in self.draft.values:
            return self.draft.values[key]
        if node in self.layouts.conflicts:
            code, reason = self.layouts.conflicts[node]
            raise self.region.refuse(node, code, reason)
        rule = rule_of(node)
        if rule is None:
            raise self.unknown(node)
        if not rule.is_local(self.layouts, node):
            message = "{op} runs over the rows of a vocabulary-sized tensor, not over its vocabulary"
            raise self.region.refuse(node, "MIXES_ROWS", message)
        self.draft.values[key] = result = rule.emit(self, node, rowmap)
        tried(type(rule).__name__, True)
        if isinstance(result, fx.Node):
            result.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        return result

    def applied(self, node: fx.Node, of: fx.Node, given: fx.Node, rowmap: RowMap) -> fx.Node:
        """The body's value of a pointwise ``node`` with the value ``given`` for its operand ``of``."""
        from .rules import POINTWISE

        key, values = (of, rowmap, self._recomputes), self.draft.values
        before = values.get(key)
        values[key] = given
        try:
            result = POINTWISE.emit(self, node, rowmap)
        finally:
            if before is None:
                del values[key]
            else:
                values[key] = before
        result.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        return result

    def unknown(self, node: fx.Node) -> Rejection:
        """The refusal of an operation without a row rule."""
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            message = "{op} draws random numbers for the logits, and chunks would draw others"
            return self.region.refuse(node, "RANDOM", message)
        message = "{op} reads the logits and is not known to treat each row apart"
        return self.region.refuse(node, "NO_ROW_RULE", message)

    def dense(self, node: fx.Node, rowmap: RowMap) -> fx.Node:
        """``[n, C]`` of a region node."""
        return self.draft.dense(self.value(node, rowmap), self.builder.dim(self.layouts.columns(node)))

    def dense_operand(self, node: fx.Node, vocab: int, rowmap: RowMap) -> fx.Node:
        """``[n, K]`` of an operand that has a dimension of its own along ``vocab`` (an index, a source)."""
        sizes = shape(node)
        return self.draft.dense(self.operand(node, sizes, vocab, rowmap), self.builder.dim(sizes[vocab]))

    def head(self, head: Head, rowmap: RowMap) -> fx.Node:
        """``[n, V]`` logits."""
        hidden = self.draft.row_index(head.hidden_rows(self.builder), rowmap)
        weight = self.draft.whole_index(head.weight_columns(self.builder))
        if head.bias is None or head.factors == (1, 1):
            bias = None if head.bias is None else self.draft.whole_index(head.bias)
            return self.draft.project(Projection(hidden, weight, bias))
        alpha, beta = head.factors
        logits = self.call(aten.mul.Tensor, self.draft.project(Projection(hidden, weight)), alpha)
        columns = self.builder.view(head.bias, [1, head.vocabulary])
        return self.call(aten.add.Tensor, logits, self.call(aten.mul.Tensor, self.draft.whole(columns), beta))

    def operand(self, x: Any, sizes: list[Size], vocab: int | None, rowmap: RowMap) -> Any:
        """An argument of a node of shape ``sizes`` with vocabulary dimension ``vocab``, in canonical form."""
        if not isinstance(x, fx.Node):
            return [self.operand(i, sizes, vocab, rowmap) for i in x] if isinstance(x, (list, tuple)) else x
        if not is_tensor(x):
            return self._scalar(x)
        if self.layouts.group(x) is not None and self._is_inline(x):
            return self.group_value(x, rowmap)
        layout = self.layouts.get(x)
        if layout is not None:
            shift = len(sizes) - len(shape(x))
            fits = layout.vocab is None or vocab is None or layout.vocab + shift == vocab
            rows_fit = same_sizes(aligned_rows(shape(x), len(sizes), vocab), aligned_rows(sizes, len(sizes), vocab))
            if fits and rows_fit and (self.layouts.is_wide(x) or self._is_inline(x)):
                return self.value(x, rowmap)
            if self.layouts.is_wide(x):
                raise self.region.refuse(
                    x,
                    "MIXES_ROWS",
                    "the logits are broadcast over rows; expand the hidden states instead, before the head",
                )
        if layout is None and target_of(x) in (aten.full.default, aten.scalar_tensor.default):
            return self.constant(x, x.args[1] if x.target is aten.full.default else x.args[0])
        if layout is None and target_of(x) is aten.expand.default:
            return self.spread(node_arg(x, 0), sizes, vocab, rowmap)
        return self.outer(x, sizes, vocab, rowmap)

    def _is_inline(self, x: fx.Node) -> bool:
        """A row's or group's value that this program computes; others are read."""
        now = self._recomputes or self.region.depths[x] == self.draft.depth
        return now and self.region.comes_from_logits(x)

    def group_value(self, node: fx.Node, rowmap: RowMap) -> fx.Node:
        """``[n, 1]`` of a node with one value a group of rows, repeated for each row of the group."""
        from .groups import REDUCTIONS
        from .rules import POINTWISE, is_pointwise
        from .rules.reductions import Reduction

        if rowmap.steps:
            raise self.region.refuse(node, "MIXES_ROWS", "a value of whole sequences is read for selected rows")
        key = (node, "group")
        if key in self.draft.values:
            return self.draft.values[key]
        group = self.layouts.group(node)
        assert group is not None
        length = self.builder.dim(group.length)
        if self.draft.group not in (1, length):
            raise self.region.refuse(node, "MIXES_ROWS", "sequences of several lengths share rows")
        self.draft.group = length
        before, self._group = self._group, None
        try:
            first = node.args[0]
            if node.target in REDUCTIONS and self.layouts.group(first) is None:
                x = self.draft.dense(self.operand(first, shape(first), None, rowmap), 1)
                columns = [-1, self.draft.size(length)]
                each = Reduction.write(self, node, self.call(aten.reshape.default, x, columns))
                each = self.call(aten.expand.default, each, columns)
                result = self.call(aten.reshape.default, each, [self.draft.n, 1])
            elif is_pointwise(node.target):
                self._group = group.length
                result = POINTWISE.emit(self, node, rowmap)
            else:
                result = self.operand(first, shape(first), None, rowmap)
        finally:
            self._group = before
        self.draft.values[key] = result
        return result

    def _outer_of_group(self, x: fx.Node, sizes: list[Size], length: Size) -> fx.Node:
        """A tensor from outside of the region with one value a group, for each row of the group."""
        b, groups = self.builder, numel(sizes)
        padded = b.view(x, right_aligned(shape(x), len(sizes)))
        values = b.view(b.call(aten.expand.default, padded, b.dims(sizes)), [groups, 1])
        rows = b.call(aten.expand.default, values, b.dims([groups, length]))
        return self.draft.row(b.view(rows, [groups * length, 1]), RowMap())

    def spread(self, x: fx.Node, sizes: list[Size], vocab: int | None, rowmap: RowMap) -> fx.Node:
        """An operand that is expanded to ``sizes``; a 0-dim one stays dimensioned, as the user's was (types promote
        so)."""
        if shape(x):
            return self.operand(x, sizes, vocab, rowmap)
        return self.call(aten.reshape.default, self.draft.whole(x), [1, 1])

    def constant(self, x: fx.Node, fill: Any) -> fx.Node:
        """A constant tensor: one element stands for all of them."""
        dims = [1, 1] if shape(x) else []  # 0-dim stays 0-dim: types promote differently
        if isinstance(fill, fx.Node):
            number = self._scalar(fill)
            if not isinstance(value(fill), torch.SymInt):
                number = self.call(prims.convert_element_type.default, number, value(x).dtype)
                return self.call(aten.reshape.default, number, dims)
            fill = number
        return self.call(aten.full.default, dims, fill, dtype=value(x).dtype, device=value(x).device)

    def _scalar(self, x: fx.Node) -> fx.Node:
        if isinstance(value(x), torch.SymInt):
            return cast(fx.Node, self.draft.size(x))
        if isinstance(value(x), torch.SymFloat):
            # A float that varies becomes a 0-dim tensor; float64 and 0-dim promote as a Python float does.
            device = next(iter(self.region.heads)).meta["val"].device
            tensor = self.builder.call(aten.scalar_tensor.default, x, dtype=torch.float64, device=device)
            return self.draft.whole(tensor)
        raise self.region.refuse(x, "NO_ROW_RULE", f"an argument of type {type(value(x)).__name__} cannot be streamed")

    def outer(self, x: fx.Node, sizes: list[Size], vocab: int | None, rowmap: RowMap) -> fx.Node:
        """A tensor from outside of the region, aligned to ``sizes`` from the right."""
        b, own = self.builder, shape(x)
        if not own:
            return self.draft.whole(x)
        if self._group is not None:
            return self._outer_of_group(x, sizes, self._group)
        padded = right_aligned(own, len(sizes))
        columns: Size = 1 if vocab is None else padded[vocab]
        rows, all_rows = aligned_rows(own, len(sizes), vocab), aligned_rows(sizes, len(sizes), vocab)
        order = list(range(len(sizes))) if vocab is None else [i for i in range(len(sizes)) if i != vocab] + [vocab]
        flat = b.permute(b.view(x, padded), order)
        one_row = all(is_one(r) for r in all_rows)  # of a loop over rows: what it reads is another in each piece
        if all(is_one(r) for r in rows) and not (one_row and is_one(columns)):
            return self.draft.whole(b.view(flat, [1, columns]))
        if same_sizes(rows, all_rows) and (is_one(columns) or not rowmap.steps):
            return self.draft.row(b.view(flat, [numel(rows), columns]), rowmap)
        if is_one(columns):
            flat = b.call(aten.expand.default, flat, b.dims([*all_rows, *([1] if vocab is not None else [])]))
            return self.draft.row(b.view(flat, [numel(all_rows), 1]), rowmap)
        # Vocabulary-sized and shared by rows (a mask per sequence), or shifted: pick its rows inside the chunk, so that
        # no [rows, vocabulary] copy of it is made.
        iota = b.view(b.iota(numel(rows), value(x).device), rows)
        index = b.view(b.call(aten.expand.default, iota, b.dims(all_rows)), [numel(all_rows), 1])
        picked = self.call(aten.select.int, self.draft.row(index, rowmap), 1, 0)
        return self.call(aten.index.Tensor, self.draft.whole(b.view(flat, [numel(rows), columns])), [picked])

    def from_parent(self, parent: fx.Node, step: Step, rowmap: RowMap) -> fx.Node:
        """A value of ``parent`` whose rows ``step`` selects."""
        return self.value(parent, rowmap.then(step))

    def where_present(self, step: Step, rowmap: RowMap, chosen: fx.Node, base: fx.Node) -> fx.Node:
        """``chosen`` on the rows that an inverse step reaches, ``base`` elsewhere."""
        device = self._device()
        present = step.present(self.builder, device)
        positions = rowmap.positions(self.builder, device)
        if positions is not None:
            present = self.builder.take_rows(present, positions)
        flags = self.builder.view(present, [numel(shape(present)), 1])
        return self.call(aten.where.self, self.draft.row(flags, RowMap()), chosen, base)

    def column_numbers(self, columns: Size) -> fx.Node:
        """``[1, C]`` int64: 0, 1, 2, ..."""
        size = self.draft.size(self.builder.dim(columns))
        iota = self.call(
            prims.iota.default, size, start=0, step=1, dtype=torch.int64, device=self._device(), requires_grad=False
        )
        return self.call(aten.reshape.default, iota, [1, size])

    def _device(self) -> torch.device:
        return value(next(iter(self.region.heads))).device
