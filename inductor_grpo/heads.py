"""Heads: the matmuls that make logits."""

from __future__ import annotations

import dataclasses

import torch.fx as fx

from ._compat.collectives import is_functional
from .graph import GraphBuilder, Size, ancestors, arg, aten, hint, is_tensor, node_arg, numel, shape, target_of

MATMULS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Matmul targets and the position of their first factor."""

_PASSES_THROUGH = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int,
    aten.clone.default, aten.alias.default, aten._to_copy.default,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Head:
    """``node`` = alpha * hidden x weight (+ beta * bias), with its vocabulary along dimension ``vocab`` of the
    result."""

    node: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    vocab: int

    def hidden_rows(self, b: GraphBuilder) -> fx.Node:
        """Hidden as ``[N, H]``."""
        return b.permute(self.hidden, [1, 0]) if self.vocab == 0 else self.hidden

    def weight_columns(self, b: GraphBuilder) -> fx.Node:
        """The weight as ``[H, V]``."""
        return b.permute(self.weight, [1, 0]) if self.vocab == 0 else self.weight

    @property
    def factors(self) -> tuple[float, float]:
        """alpha and beta."""
        return arg(self.node, 4, "alpha", 1), arg(self.node, 3, "beta", 1)

    @property
    def inner(self) -> Size:
        """H."""
        return shape(self.weight)[1 if self.vocab == 0 else 0]

    @property
    def vocabulary(self) -> Size:
        """V."""
        return shape(self.node)[self.vocab]


def weight_root(node: fx.Node) -> fx.Node:
    """The tensor that a weight operand is a view, a part or a cast of, or is gathered from over the ranks."""
    while target_of(node) in _PASSES_THROUGH or _is_cast(node) or (is_functional(node) and is_tensor(node.args[0])):
        node = node_arg(node, 0)
    return node


def _is_cast(node: fx.Node) -> bool:
    return target_of(node) is not None and "convert_element_type" in str(node.target)


def find_heads(graph: fx.Graph, after_tangent: set[fx.Node]) -> list[Head]:
    """The forward matmuls that are wider than hidden: ``[N, H] x [H, V]`` with V > H, in either orientation.

    Of heads with very different V only the widest count, and none that another's weight is computed from: a layer of
    the network or a low-rank update of a weight is no head.  Nor is the product of what a head gave with its own hidden
    or weight: a loss that writes its gradients in the forward (``torch.func.grad``) has them there.
    """
    heads = []
    for node in graph.nodes:
        target = target_of(node)
        if target not in MATMULS or node in after_tangent or not is_tensor(node):
            continue
        head = _as_head(node, MATMULS[target], after_tangent)
        if head is not None:
            heads.append(head)
    heads = [h for h in heads if not any(_is_gradient(h, of) for of in heads if of is not h)]
    widest = max((hint(h.vocabulary) for h in heads), default=0)
    in_weights = ancestors([h.weight for h in heads])
    return [h for h in heads if hint(h.vocabulary) * 2 > widest and h.node not in in_weights]


def _is_gradient(product: Head, head: Head) -> bool:
    """``product`` multiplies a value of the size of the vocabulary that is computed from ``head`` with an operand of
    ``head``."""
    own = {weight_root(head.hidden), weight_root(head.weight)}
    for operand, other in ((product.hidden, product.weight), (product.weight, product.hidden)):
        if weight_root(operand) in own and hint(head.vocabulary) in map(hint, shape(other)):
            if head.node in ancestors([other]):
                return True
    return False


def _as_head(node: fx.Node, first: int, after_tangent: set[fx.Node]) -> Head | None:
    a, b = node_arg(node, first), node_arg(node, first + 1)
    rows, inner, columns = shape(a)[-2], shape(a)[-1], shape(b)[-1]
    bias: fx.Node | None = None
    if first == 1:
        bias = node_arg(node, 0)
        if len(shape(bias)) != 1:
            return None
    right, left = hint(columns) > hint(inner), hint(rows) > hint(inner) and first == 0
    if left:  # or it has more tokens than features, as a layer of the network has too
        sizes = _sizes_run_over(node, after_tangent)
        only = hint(columns) not in sizes or (right and _is_parameter(a) and not _is_parameter(b))
        left = hint(columns) > 1 and hint(rows) in sizes and only
        right = right and not left
    if right:
        return Head(node, a, b, bias, 1)
    return Head(node, b, a, None, 0) if left else None


def _sizes_run_over(node: fx.Node, after_tangent: set[fx.Node]) -> set[int]:
    """The sizes of the dimensions that the forward reduces, scans or gathers along in tensors as large as ``node``."""
    from .rules import RULES
    from .rules.indexing import Gather
    from .rules.reductions import MULTIPLE, WHOLE, Reduction, Scan, reduced_dims

    elements, seen, work, found = hint(numel(shape(node))), {node}, [node], set[int]()
    while work:
        x = work.pop()
        for user in x.users:
            rule = RULES.get(user.target)
            if user in after_tangent or user in seen or target_of(user) in MATMULS:
                continue
            if isinstance(rule, Gather) and user.args[0] is x:
                found.add(hint(shape(x)[arg(user, 1, "dim")]))
            if isinstance(rule, (Reduction, Scan)) or target_of(user) in MULTIPLE | WHOLE:
                dims = reduced_dims(user)
                found |= {hint(shape(x)[d]) for d in dims} if len(dims) == 1 else set()
            if is_tensor(user) and hint(numel(shape(user))) == elements:
                seen.add(user)
                work.append(user)
    return found


def _is_parameter(node: object) -> bool:
    """A matrix that the caller hands in (through views and casts)."""
    root = weight_root(node) if isinstance(node, fx.Node) else None
    return root is not None and root.op in ("placeholder", "get_attr") and len(shape(root)) == 2
