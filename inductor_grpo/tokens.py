"""What the inputs of a loss are, from Dynamo's graph of it: tokens, features, counts, factors.

The answers choose which inputs become symbols (:mod:`inductor_grpo.generalise`).  A wrong one costs a compilation, and
never a number: what a trace then finds is guarded as in stock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from inductor_grpo._compat import frames

SEAMS = {"index_add", "scatter_add", "scatter_reduce", "index_put", "index_reduce", "segment_reduce", "one_hot"}
SEAMS |= {"bincount", "repeat_interleave", "bucketize"}
LOG_PROBS = {"log_softmax", "logsumexp", "cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"}
MODELS = {
    "scaled_dot_product_attention",
    "flex_attention",
    "conv1d",
    "conv2d",
    "conv3d",
    "multi_head_attention_forward",
}
MATMULS = {"matmul", "mm", "linear", "addmm", "bmm", "baddbmm", "einsum", "mv"}
OVER_FEATURES = LOG_PROBS | {"softmax", "log_softmax", "layer_norm", "rms_norm"}
MOST_PARAMETERS = 8
"""A frame with more of them is a model with its loss, where one more trace is dear."""

ARITHMETIC = {"mul", "add", "sub", "div", "truediv", "true_divide", "rsub", "gt", "lt", "ge", "le", "eq", "ne"}
ARITHMETIC |= {"iadd", "isub", "imul", "itruediv", "multiply", "subtract", "divide"}
SIZES = {"new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full", "empty", "arange", "bincount"}
SIZES |= {"one_hot", "view", "reshape", "expand", "repeat", "split", "narrow", "unflatten", "eye", "repeat_interleave"}
SIZES |= {"getitem"}


def holds_loss(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo is a loss of ours: it holds a log-probability or a seam, and no model."""
    names = {name_of(node) for graph in frames.iterate_graphs(gm) for node in graph.nodes if node.op in CALLS}
    logsumexp_by_hand = {"exp", "sum", "log"} <= names and bool(names & (MATMULS | {"gather"}))
    if not (names & (SEAMS | LOG_PROBS) or logsumexp_by_hand) or names & MODELS:
        return False
    parameters = [p for p in gm.graph.find_nodes(op="placeholder") if _is_parameter(p)]
    return len(parameters) <= MOST_PARAMETERS


CALLS = ("call_function", "call_method")


def name_of(node: torch.fx.Node) -> str:
    """The operation of a node without its module, its overload and the underscore of in-place operations."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0].strip("_")


class Roles:
    """The roles of a graph's inputs."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.weights: set[torch.fx.Node] = set()
        self.over_features: set[torch.fx.Node] = set()
        self.factors: set[float] = set()
        self.sizes: set[float] = set()
        self.other: set[float] = set()
        for graph in frames.iterate_graphs(gm):
            for node in graph.nodes:
                if node.op in CALLS:
                    self._read_operands(node)
                    self._read_numbers(node)

    # Tensors

    def token_dims(self, node: torch.fx.Node | None, rank: int) -> frozenset[int]:
        """The dimensions of an input of that rank that count tokens, sequences or segments.

        All of them, except for weights and for the last dimension of what has features: hidden states and logits by
        their use, anything of three dimensions and more by its look.
        """
        if node is not None and node in self.weights:
            return frozenset()
        with_features = rank >= 3 or (node is not None and node in self.over_features)
        return frozenset(range(rank - 1 if with_features else rank))

    def _read_operands(self, node: torch.fx.Node) -> None:
        name = name_of(node)
        operands = [argument for argument in node.args if isinstance(argument, torch.fx.Node) and _is_tensor(argument)]
        if name in MATMULS:
            if name in ("addmm", "baddbmm") and len(operands) == 3:
                self._spread(operands[0])
                operands = operands[1:]
            elif name == "linear" and len(operands) == 3:
                self._spread(operands[2])
                operands = operands[:2]
            if len(operands) == 2 and not any(_is_selection(operand) for operand in operands):
                self._read_matmul(*operands)
        elif name in OVER_FEATURES and operands:
            self._spread(operands[0])

    def _read_matmul(self, rows: torch.fx.Node, weight: torch.fx.Node) -> None:
        if _rank(weight) != 2 or (_rank(rows) == 2 and _is_parameter(_origin(rows))):
            rows, weight = weight, rows
        if _rank(weight) == 2 and _rank(rows) >= 2:
            self._take_weight(weight)
        if _rank(rows) >= 2 and _rank(weight) >= 2:
            self._spread(rows)

    def _take_weight(self, node: torch.fx.Node) -> None:
        """A weight and what it is made of: casts, transposes, low-rank terms."""
        stack, seen = [node], set()
        while stack:
            node = stack.pop()
            if node in seen or _rank(node) != 2:
                continue
            seen.add(node)
            if node.op == "placeholder":
                self.weights.add(node)
            stack += node.all_input_nodes

    def _spread(self, node: torch.fx.Node) -> None:
        """Features run along the last dimension of ``node``, and of what it is made of as long as the size stays."""
        stack, seen = [node], set()
        while stack:
            node = stack.pop()
            if node in seen or node in self.weights:
                continue
            seen.add(node)
            if node.op == "placeholder":
                self.over_features.add(node)
            size = _shape(node)[-1]
            stack += [
                operand
                for operand in node.all_input_nodes
                if _is_tensor(operand) and _rank(operand) and frames.same_size(_shape(operand)[-1], size)
            ]

    # Numbers

    def is_count(self, value: int, node: torch.fx.Node | None) -> bool:
        """Whether an int is a size of something that the graph makes, or a factor; not a dimension or an index."""
        if node is not None:  # symbolic already, and not burnt in
            return True
        return value >= 0 and bool({value - 1, value, value + 1} & self.sizes or value in self.factors)

    def is_factor(self, value: float, node: torch.fx.Node | None) -> bool:
        """Whether a float only scales tensors or is compared with them, so that it can be a tensor itself."""
        if node is not None:
            return _only_scales(node)
        if not math.isfinite(value):
            return False
        forms = {value, -value, 1 - value, 1 + value, value - 1, value * value}
        if value:
            forms.add(1 / value)
        return bool(forms & self.factors) and not forms & self.other

    def _read_numbers(self, node: torch.fx.Node) -> None:
        name = name_of(node)
        numbers = set(_numbers((node.args, node.kwargs)))
        if name in SIZES:
            self.sizes |= numbers
        elif name in ARITHMETIC:
            self.factors |= numbers
        else:
            self.other |= {number for number in numbers if isinstance(number, float)}


def _only_scales(node: torch.fx.Node) -> bool:
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "output":
            return False
        value = user.meta.get("example_value")
        if isinstance(value, torch.SymFloat):
            stack += user.users
        elif name_of(user) not in ARITHMETIC:
            return False
    return True


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif type(value) in (int, float):
        yield value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor)


def _is_parameter(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter) or node.op == "get_attr"


def _is_selection(node: torch.fx.Node) -> bool:
    """A one-hot matrix: a matmul with it is a seam, not a head."""
    while len(node.all_input_nodes) == 1 and name_of(node) != "one_hot" and node.op in CALLS:
        node = node.all_input_nodes[0]
    return name_of(node) in ("one_hot", "eq")


def _origin(node: torch.fx.Node) -> torch.fx.Node:
    while node.op in CALLS and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _shape(node: torch.fx.Node) -> Any:
    return node.meta["example_value"].shape


def _rank(node: torch.fx.Node) -> int:
    return len(_shape(node)) if _is_tensor(node) else 0
