"""Sizes that a trace takes as arguments of its graph, although the tensors that have them are arguments too.

Each unbacked size of an input is an argument of its own, which Dynamo's generated code reads at every call, and the
graph begins with assertions that they are equal and not negative.  Sizes that the trace made one symbol are equal in
every call that its guards let through, so one argument a symbol does and the assertions say nothing new.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

log = logging.getLogger("inductor_grpo")


def drop_repeated(graph: fx.Graph, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Removes from ``gm`` what its inputs repeat; the inputs that stay.  ``graph`` is Dynamo's own, from which it takes
    the arguments of the compiled function after the backend has run."""
    inputs = list(example_inputs)
    arguments = gm.graph.find_nodes(op="placeholder")
    if gm.graph is not graph or len(arguments) != len(inputs):
        return inputs
    silent, repeated = _find(gm.graph)  # everything that is private is read before anything changes
    for node in silent:
        condition = node.all_input_nodes[0]
        gm.graph.erase_node(node)
        if not condition.users:
            gm.graph.erase_node(condition)
    for node, first in repeated.items():
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
    if silent or repeated:
        log.debug("%d sizes are no arguments of the graph", len(repeated))
        gm.recompile()
    return [given for node, given in zip(arguments, inputs, strict=True) if node not in repeated]


def _find(graph: fx.Graph) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """The assertions that say nothing, and each repeated size with the one that stays.

    One stays in any case: without it, each tensor would be asked for its size."""
    sizes = [(node, _symbolic(node)) for node in graph.find_nodes(op="placeholder") if _is_size(node)]
    known = [(node, size._expr, size.expr) for node, size in sizes if size is not None]
    # A symbol with a value stays bound: Inductor writes what was assumed about it once more.
    known = [k for k in known if free_unbacked_symbols(k[1]) and free_unbacked_symbols(k[2])]
    symbols = {expr for _, expr, _ in known}
    silent = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
        if isinstance(node.args[0], fx.Node) and _says_nothing(_symbolic(node.args[0]), symbols)
    ]
    chosen: dict[sympy.Expr, fx.Node] = {}
    for node, _, common in sorted(known, key=lambda size: size[1] != size[2]):
        chosen.setdefault(common, node)
    return silent, {node: chosen[common] for node, _, common in known if chosen[common] is not node}


def _is_size(node: fx.Node) -> bool:
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    source = getattr(node.meta.get("grapharg"), "source", None)
    return isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE


def _symbolic(node: fx.Node) -> Any:
    """What stands behind a symbolic value: ``_expr`` before, ``expr`` after equal symbols became one."""
    return getattr(node.meta.get("example_value"), "node", None)


def _says_nothing(condition: Any, sizes: set[sympy.Expr]) -> bool:
    """Whether a condition compares sizes of inputs, and holds once equal symbols are one and none is negative."""
    if condition is None or not condition._expr.free_symbols <= sizes:
        return False
    plain = {s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in condition.expr.free_symbols}
    return condition.expr.xreplace(plain) == sympy.true
