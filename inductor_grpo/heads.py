"""Heads: the matmuls that make logits."""

from __future__ import annotations

import dataclasses

import torch.fx as fx

from .graph import GraphBuilder, Size, arg, aten, hint, is_one, is_tensor, numel, shape, target_of

MATMULS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}
"""Matmul targets and the position of their first factor."""

_PASSES_THROUGH = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.clone.default, aten.alias.default,
    aten._to_copy.default,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Head:
    """``node`` = hidden x weight (+ bias), with its vocabulary along dimension ``vocab`` of the result."""

    node: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    vocab: int

    def hidden_rows(self, b: GraphBuilder) -> fx.Node:
        """Hidden as ``[N, H]``."""
        sizes = shape(self.hidden)
        if self.vocab == 0:
            return b.permute(self.hidden, [1, 0])
        return b.view(self.hidden, [numel(sizes[:-1]), sizes[-1]])

    def weight_columns(self, b: GraphBuilder) -> fx.Node:
        """The weight as ``[H, V]``."""
        if self.vocab == 0:
            return b.permute(self.weight, [1, 0])
        return b.call(aten.select.int, self.weight, 0, 0) if len(shape(self.weight)) == 3 else self.weight

    @property
    def vocabulary(self) -> Size:
        """V."""
        return shape(self.node)[self.vocab]


def weight_root(node: fx.Node) -> fx.Node:
    """The tensor that a weight operand is a view, a part or a cast of."""
    while target_of(node) in _PASSES_THROUGH or _is_cast(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_cast(node: fx.Node) -> bool:
    return target_of(node) is not None and "convert_element_type" in str(node.target)


def find_heads(graph: fx.Graph, after_tangent: set[fx.Node]) -> list[Head]:
    """The forward matmuls that are wider than hidden: ``[N, H] x [H, V]`` with V > H, in either orientation."""
    heads = []
    for node in graph.nodes:
        target = target_of(node)
        if target not in MATMULS or node in after_tangent or not is_tensor(node):
            continue
        head = _as_head(node, MATMULS[target])
        if head is not None:
            heads.append(head)
    return heads


def _as_head(node: fx.Node, first: int) -> Head | None:
    a, b = node.args[first], node.args[first + 1]
    rows, inner, columns = shape(a)[-2], shape(a)[-1], shape(b)[-1]
    bias: fx.Node | None = None
    if first == 1:
        bias = node.args[0]  # type: ignore[assignment]
        if arg(node, 3, "beta", 1) != 1 or arg(node, 4, "alpha", 1) != 1 or len(shape(bias)) != 1:
            return None
    wide_right, wide_left = hint(columns) > hint(inner), hint(rows) > hint(inner)
    if target_of(node) is aten.bmm.default and not _is_batch_of_one(node, b):
        return None
    if wide_right and not (wide_left and _is_parameter(a) and not _is_parameter(b)):
        return Head(node, a, b, bias, len(shape(node)) - 1)  # type: ignore[arg-type]
    if wide_left and first == 0 and target_of(node) is aten.mm.default and _is_parameter(a) and not _is_parameter(b):
        return Head(node, b, a, None, 0)  # type: ignore[arg-type]
    return None


def _is_batch_of_one(node: fx.Node, weight: object) -> bool:
    """One batch, or one weight that is repeated for every batch."""
    if is_one(shape(node)[0]):
        return True
    while isinstance(weight, fx.Node) and target_of(weight) in _PASSES_THROUGH:
        if target_of(weight) is aten.expand.default:
            source = shape(weight.args[0])
            return len(source) < len(shape(weight)) or is_one(source[0])
        weight = weight.args[0]
    return False


def _is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and len(shape(node)) == 2 and weight_root(node).op in ("placeholder", "get_attr")
