"""A graph as a script that rebuilds it and runs it on random inputs of the same shapes."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.fx as fx

from inductor_grpo.graph import arg, aten, hint, is_tensor, node_arg, shape, target_of

HEADER = '''"""{title}: rebuilt from a dump; run it with ``python {file}``."""

import math
import operator

import torch
from math import inf, nan
from torch import device

import inductor_grpo.passes  # registers the operators of ours

'''
MAIN = """

if __name__ == "__main__":
    torch.manual_seed(0)
    for number, result in enumerate(Graph().forward(*inputs())):
        print(number, (result.dtype, tuple(result.shape)) if isinstance(result, torch.Tensor) else result)
"""
_LOOKED_UP = {aten.gather.default: 1, aten.scatter_add.default: 1, aten.scatter.src: 1, aten.scatter.value: 1}
_SAME_NUMBERS = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
    aten.permute.default, aten.slice.Tensor, aten.select.int, aten.clone.default, aten.alias.default,
    aten.where.self, aten.clamp.default, aten.clamp_min.default, aten.constant_pad_nd.default,
}  # fmt: skip


def script(graph: fx.Graph, title: str, file: str, like: fx.Graph | None = None) -> str:
    """The source.  ``like`` is the graph before a rewrite: what integer inputs index is read off it too.

    Raises ValueError for a graph that holds subgraphs."""
    code = graph.python_code("self")
    extra = [_import(name, value) for name, value in sorted(code.globals.items())]
    attributes = [_constant(graph, node) for node in graph.nodes if node.op == "get_attr"]
    parts = [HEADER.format(title=title, file=file) + "".join(sorted(filter(None, extra)))]
    body = "\n".join("    " + line if line else line for line in code.src.strip().splitlines())
    parts.append("\n\nclass Graph:\n" + "".join(dict.fromkeys(attributes)) + body + "\n")
    bounds = {**(_bounds(like) if like is not None else {}), **_bounds(graph)}
    made = [f"        {_input(n, bounds.get(n.name))},  # {n.name}" for n in graph.nodes if n.op == "placeholder"]
    parts.append("\n\ndef inputs():\n    return (\n" + "\n".join(made) + "\n    )\n" if made else EMPTY)
    return "".join(parts) + MAIN


EMPTY = "\n\ndef inputs():\n    return ()\n"


def _import(name: str, value: Any) -> str:
    if name in ("torch", "inf", "nan", "device", "math", "operator"):
        return ""
    if value is types.NoneType:
        return f"{name} = type(None)\n"
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}\n"
    if isinstance(getattr(value, "__qualname__", None), str) and getattr(value, "__module__", None):
        return f"from {value.__module__} import {value.__qualname__} as {name}\n"
    return ""


def _constant(graph: fx.Graph, node: fx.Node) -> str:
    value: Any = graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"the graph holds {type(value).__name__} {node.target}, which a script cannot rebuild")
    numbers = f"torch.tensor({value.tolist()}, dtype={value.dtype})" if value.numel() <= 64 else _tensor(value, None)
    return f"    {node.target} = {numbers}\n"


def _input(node: fx.Node, bound: int | None) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _tensor(value, bound)
    number = hint(value) if isinstance(value, torch.SymInt) else getattr(getattr(value, "node", None), "hint", value)
    return repr(number)


def _tensor(value: torch.Tensor, bound: int | None) -> str:
    sizes, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    dtype, on = value.dtype, f"device={str(value.device)!r}" if value.device.type != "cpu" else ""
    more = "".join(f", {part}" for part in (f"dtype={dtype}", on) if part)
    if dtype is torch.bool:
        made = f"(torch.rand({sizes}{', ' + on if on else ''}) < 0.5)"
    elif dtype.is_floating_point or dtype.is_complex:
        made = f"torch.randn({sizes}{more})"
    else:
        made = f"torch.randint(0, {max(1, bound or 1)}, {sizes}{more})"
    contiguous = list(torch.empty(sizes, device="meta").stride())
    if strides == contiguous or 0 in sizes:
        return made
    return f"torch.empty_strided({sizes}, {strides}{more}).copy_({made})"


def _bounds(graph: fx.Graph) -> dict[str, int]:
    """For each integer input, the size of the smallest dimension that it indexes."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
            sizes = _indexed(node)
            if sizes:
                found[node.name] = min(sizes)
    return found


def _indexed(node: fx.Node) -> list[int]:
    sizes: list[int] = []
    work, seen = [node], {node}
    while work:
        index = work.pop()
        for user in index.users:
            target = target_of(user)
            if target in _LOOKED_UP and arg(user, 2, "index") is index:
                sizes.append(hint(shape(node_arg(user, 0))[arg(user, 1, "dim")]))
            elif target in (aten.index.Tensor, aten.index_put.default):
                positions = [d for d, i in enumerate(user.args[1]) if i is index]  # type: ignore[arg-type]
                sizes += [hint(shape(node_arg(user, 0))[d]) for d in positions]
            elif target is aten.embedding.default and user.args[1] is index:
                sizes.append(hint(shape(node_arg(user, 0))[0]))
            elif target is aten.index_select.default and user.args[2] is index:
                sizes.append(hint(shape(node_arg(user, 0))[user.args[1]]))  # type: ignore[index]
            elif target in _SAME_NUMBERS and user not in seen and is_tensor(user):
                seen.add(user)
                work.append(user)
    return sizes
