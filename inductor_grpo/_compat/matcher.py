"""Inductor's pattern matcher, as far as patterns on chunk programs need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.fx as fx
from torch._inductor import pattern_matcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .fxgraph import SIZE_OF_DATA, size_hint


def trace(function: Callable[..., Any], *examples: torch.Tensor) -> fx.GraphModule:
    """``function`` in Inductor's decomposed operations."""
    from torch._inductor.decomposition import select_decomp_table

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in examples]
    with mode, torch.no_grad():
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)


class Matcher:
    """A PatternMatcherPass over graphs that are traced from functions of ``z`` (and ``zero``)."""

    def __init__(self, name: str) -> None:
        self._pass = pattern_matcher.PatternMatcherPass(pass_name=name)

    def add(
        self, graph: fx.GraphModule, accept: Callable[..., bool], handle: Callable[[fx.Graph, fx.Node, fx.Node], None]
    ) -> None:
        """Registers a traced pattern: at a match whose arguments ``accept`` lets through, ``handle(graph, z, root)`` is
        called."""
        pattern = pattern_matcher.fx_to_pattern(graph, argnames=("z", "zero"))
        _allow_other_users(pattern, set())

        def check(match: Any) -> bool:
            return accept(**match.kwargs)

        def handler(match: Any, z: fx.Node, zero: fx.Node | None = None) -> None:
            handle(match.output_node().graph, z, match.output_node())

        pattern_matcher.register_graph_pattern(pattern, extra_check=check, pass_dict=self._pass)(handler)

    def apply(self, graph: fx.Graph) -> int:
        """Looks for the patterns everywhere in ``graph``; returns how many were found."""
        if graph.owning_module is None:
            graph.owning_module = fx.GraphModule(torch.nn.Module(), graph)
        return self._pass.apply(graph)


def _allow_other_users(pattern: Any, seen: set[int]) -> None:
    """Values inside of a match may be used elsewhere: the match replaces its result, not its parts."""
    if id(pattern) in seen:
        return
    seen.add(id(pattern))
    if hasattr(pattern, "users"):
        pattern.users = pattern_matcher.MULTIPLE
    for part in (*getattr(pattern, "args", ()), *getattr(pattern, "kwargs", {}).values()):
        if isinstance(part, pattern_matcher.PatternExpr):
            _allow_other_users(part, seen)


def propagate_dtypes(
    graph: fx.Graph, n: int, logits: list[tuple[torch.dtype, int]], rows: list[Any], whole: list[Any], syms: list[int]
) -> None:
    """Writes ``meta["dtype"]`` and ``meta["columns"]`` of every tensor of a chunk body, found by running it on fake
    tensors of ``n`` rows."""
    mode = FakeTensorMode()

    def fake(sizes: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        known = [s if isinstance(s, int) else size_hint(s, SIZE_OF_DATA) for s in sizes]
        return torch.empty(known, dtype=dtype, device=device)

    class Propagate(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                node.meta["dtype"] = result.dtype
                node.meta["columns"] = result.shape[1] if result.dim() == 2 else 1
            return result

    with mode, torch.no_grad():
        device = rows[0].device
        arguments = [
            n,
            [fake([n, width], dtype, device) for dtype, width in logits],
            [fake([n, r.shape[1]], r.dtype, r.device) for r in rows],
            [fake(w.shape, w.dtype, w.device) for w in whole],
            syms,
        ]
        Propagate(fx.GraphModule(torch.nn.Module(), graph)).run(*arguments)


def inline(graph: fx.Graph, function: fx.GraphModule, args: tuple[fx.Node, ...]) -> fx.Node:
    """Copies a traced function into ``graph``; returns the node of its one result."""
    placeholders = [n for n in function.graph.nodes if n.op == "placeholder"]
    env = dict(zip(placeholders, args, strict=True))
    return cast(fx.Node, graph.graph_copy(function.graph, env))
