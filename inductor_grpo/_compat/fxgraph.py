"""Graph-level services of torch that have no public name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from .collectives import is_collective

SIZE_OF_DATA = 8192
"""Stands for a size that only the data decides, in estimates."""


def size_hint(size: torch.SymInt, fallback: int) -> int:
    """The value of a symbolic size seen while compiling, without a guard; ``fallback`` stands for each of its symbols
    that only the data decides."""
    node = size.node
    if node.has_hint():
        return int(node.hint)
    env, expr = node.shape_env, node.expr
    backed = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    known = {**backed, **getattr(env, _SEEN, {})}
    return int(expr.xreplace({symbol: known.get(symbol, fallback) for symbol in expr.free_symbols}))


def remember_sizes(env: Any, values: dict[sympy.Symbol, int]) -> None:
    """What the unbacked sizes of a trace are in the call that it was made for: for estimates, never for guards."""
    setattr(env, _SEEN, {**getattr(env, _SEEN, {}), **values})


def assertions(env: Any) -> list[Any]:
    """What a trace assumed about sizes without a value and the graph asserts, as expressions."""
    return [assertion.expr for several in env.deferred_runtime_asserts.values() for assertion in several]


_SEEN = "_inductor_grpo_sizes_seen"


def hold_below(tensors: Iterable[torch.Tensor], limit: int) -> None:
    """Makes it a condition of the compilation that ``tensors`` have fewer than ``limit`` bytes together, so that a call
    with larger ones compiles anew.  Without effect for sizes that are numbers, and for sizes that have no value."""
    total: Any = 0
    for tensor in tensors:
        size: Any = tensor.itemsize
        for dim in tensor.shape:
            size = size * dim
        if not isinstance(size, torch.SymInt) or size.node.has_hint():
            total = total + size
    if isinstance(total, torch.SymInt):
        bool(total < limit)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode that the graph's values belong to."""
    values = [
        n.meta["val"] for n in graph.nodes if n.op in ("placeholder", "get_attr", "call_function") and "val" in n.meta
    ]
    mode = detect_fake_mode(values)
    return mode if mode is not None else FakeTensorMode(allow_non_fake_inputs=True)


def build_size(graph: fx.Graph, expr: sympy.Expr, known: dict[sympy.Expr, fx.Node], before: fx.Node) -> fx.Node:
    """Nodes that compute a symbolic size from the nodes of its symbols; returns the last."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(known[symbol], tracer) for symbol in expr.free_symbols}
    with graph.inserting_before(before):
        return sympy_interp(PythonReferenceAnalysis, proxies, expr).node


def remove_noops(graph: fx.Graph) -> None:
    """Drops alias, no-op clone, slice and view nodes, in place."""
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(graph)


def common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """A new graph in which equal calls are made once (random ones are kept apart)."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def sort_topologically(graph: fx.Graph) -> None:
    """Orders the nodes so that each comes after its inputs, and otherwise as late as it stood; raises AssertionError
    when the graph has a cycle.

    Collectives keep their order among each other, whatever it takes: ranks whose graphs were rewritten differently
    (their shards differ in size) must still make the same calls in the same order.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    collectives = [n for n in graph.nodes if is_collective(n)]
    if len(collectives) < 2:
        stable_topological_sort(graph)
        return
    before = dict(zip(collectives[1:], collectives))
    pending, waiting = list(reversed(graph.nodes)), dict[fx.Node, list[fx.Node]]()
    done: dict[fx.Node, None] = {}
    while pending:
        node = pending.pop()
        needs = [*node.all_input_nodes, *([before[node]] if node in before else [])]
        missing = next((n for n in reversed(needs) if n not in done), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(node)
            continue
        done[node] = None
        pending += reversed(waiting.pop(node, []))
    assert not waiting, "the graph has a cycle"
    last: fx.Node | None = None
    for node in done:
        if last is not None and last.next is not node:
            last.append(node)
        last = node
