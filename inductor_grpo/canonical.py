"""One way to print a graph: the same text for the same graph, in every process.

::

    %mm : f32[s0, 60] = aten.mm(%primal, %permute)                        # loss.py:7  logits = hidden @ weight.t()

Nodes are named by their operation and renumbered, symbols likewise (``s0``, ``u0``), in order of appearance; devices,
layouts and torch's temporary names are left out.  A chunk program is printed once, below the graph that calls it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections import Counter
from typing import Any

import torch
import torch.fx as fx

from inductor_grpo.report import Location

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_LEFT_OUT = frozenset({"device", "layout", "pin_memory"})
_COMMENT_COLUMN = 96
END = 2**63 - 1
"""A slice without an end."""
_NAMESPACE = "inductor_grpo"


@dataclasses.dataclass(frozen=True)
class Line:
    """One node as text: ``name : type = call``."""

    node: fx.Node
    name: str
    type: str
    call: str
    location: Location | None

    def __str__(self) -> str:
        kind = f" : {self.type}" if self.type else ""
        return self.call if self.node.op == "output" else f"{self.name}{kind} = {self.call}"


@dataclasses.dataclass
class Printed:
    """A graph as lines, and the chunk programs that it calls, by name (``P1``)."""

    lines: list[Line]
    programs: dict[str, str]

    def text(self, where: bool = True) -> str:
        """The whole text; ``where`` with the users' lines, at the first of the nodes that come from one."""
        out, before = [], None
        for line in self.lines:
            text = str(line)
            if where and line.location is not None and line.location != before:
                text = f"{text:<{_COMMENT_COLUMN}}  # {_place(line.location)}"
                before = line.location
            out.append(text.rstrip())
        for name, program in self.programs.items():
            out += ["", f"{name}:", textwrap.indent(program_text(program), "    ")]
        return "\n".join(out) + "\n"


def text(graph: fx.Graph, where: bool = True) -> str:
    """``graph`` in canonical form; see :class:`Printed` for ``where``."""
    return print_graph(graph).text(where)


def print_graph(graph: fx.Graph) -> Printed:
    """The lines of a graph in its own order."""
    names, symbols = _Names(), Symbols()
    programs: dict[str, str] = {}
    lines = []
    for node in graph.nodes:
        kind = type_text(node.meta.get("val"), symbols)
        call = _call(node, names, symbols, programs)
        lines.append(Line(node, names.of(node), kind, call, Location.of(node)))
    return Printed(lines, programs)


def program_of(node: fx.Node) -> str | None:
    """The text of the program that a node runs; None for every node that is no call of an operator of ours."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != _NAMESPACE:
        return None
    return next((a for a in node.args if isinstance(a, str) and a.startswith("{")), None)


def program_text(program: str) -> str:
    """A program for people: its matmuls, its body, what it keeps."""
    data = json.loads(program)
    out = []
    for index, p in enumerate(data.get("projections", ())):
        bias = f" + whole[{p['bias']}]" if p["bias"] is not None else ""
        out.append(f"logits[{index}] = rows[{p['hidden']}] @ whole[{p['weight']}]{bias}")
    out += [_short_source(data[part]) for part in ("body", "tile", "finish") if part in data]
    if "results" in data:
        out.append("statistics: " + ", ".join(data["results"]))
    out += [_call_text(call) for call in data.get("calls", ())]
    if data.get("after"):
        out += [f"keep sum per segment: %{name}" for name in data["sums"]]
        out += [f"%z{place} = sum of all tokens: %{name}" for place, name in enumerate(data["totals"])]
        out += [_call_text(call) for call in data["after"]]
        out += [f"keep number: %{name}" for name in data["finals"]]
    else:
        for key, what in (("sums", "sum per segment"), ("totals", "sum of all tokens")):
            out += [f"keep {what}: %{name}" for name in data.get(key, ())]
    for sink in data.get("sinks", ()):
        operand = f", operand {sink['operand']}" if sink["operand"] is not None else ""
        sums = f", summed in {sink['accumulate']}" if sink["kind"] in ("outer", "outer_t", "total") else ""
        out.append(f"keep {sink['kind']}: value {sink['value']}{operand}, {sink['columns']} x {sink['dtype']}{sums}")
    return "\n".join(out)


def _call_text(call: dict[str, Any]) -> str:
    arguments = [str(a) for a in call["args"]] + [f"{k}={v}" for k, v in call["kwargs"]]
    return f"%{call['name']} : {call['dtype']} = {call['target'].removesuffix('.default')}({', '.join(arguments)})"


_NOISE = re.compile(
    r"torch\.ops\.|(?:, )?(?:device=torch\.device\([^)]*\)|layout=torch\.strided|requires_grad=False)|\.default(?=\()"
)


def _short_source(source: str) -> str:
    lines = [line for line in source.rstrip().splitlines() if not line.lstrip().startswith("del ")]
    return "\n".join(_NOISE.sub("", line) for line in lines)


class Symbols:
    """Sizes as text, with the symbols renumbered."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def text(self, size: Any) -> str:
        """A size, an int or a symbolic one."""
        if isinstance(size, (int, float, bool)):
            return repr(size)
        expression = size.node.expr if hasattr(size, "node") else size
        return re.sub(r"\b(?P<kind>zuf|zf|[su])\d+\b", lambda m: self._name(m.group(), m["kind"]), str(expression))

    def _name(self, symbol: str, kind: str) -> str:
        if symbol not in self._names:
            self._names[symbol] = f"{kind}{self._counts[kind]}"
            self._counts[kind] += 1
        return self._names[symbol]


def type_text(value: Any, symbols: Symbols) -> str:
    """``f32[4, s0]`` for a tensor, ``int s0`` for a symbolic integer, ``(..., ...)`` for several."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(symbols.text(size) for size in value.shape)
        return f"{dtype_text(value.dtype)}[{sizes}]"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        kind = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}[type(value)]
        return f"{kind} {symbols.text(value)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(type_text(item, symbols) or 'None' for item in value)})"
    return type(value).__name__ if isinstance(value, (int, float, bool)) else ""


def dtype_text(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def target_text(node: fx.Node) -> str:
    """``aten.mm`` for a call of ``aten.mm.default``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


class _Names:
    """``%mm``, ``%mm_1``, ...: by operation, in order of appearance."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, str] = {}
        self._counts: Counter[str] = Counter()

    def of(self, node: fx.Node) -> str:
        if node not in self._known:
            stem = self._stem(node)
            count = self._counts[stem]
            self._counts[stem] += 1
            self._known[node] = f"%{stem}_{count}" if count else f"%{stem}"
        return self._known[node]

    @staticmethod
    def _stem(node: fx.Node) -> str:
        if node.op == "placeholder":
            return "tangent" if node.name.startswith("tangents") else re.sub(r"[_\d]+$", "", node.name).rstrip("s")
        if node.op in ("get_attr", "output"):
            return node.op
        name = target_text(node)
        parts = name.split(".")
        return re.sub(r"\W", "_", parts[1] if len(parts) > 1 else parts[0]).strip("_")


def _call(node: fx.Node, names: _Names, symbols: Symbols, programs: dict[str, str]) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "constant"
    program = program_of(node)

    def show(x: Any) -> str:
        if isinstance(x, fx.Node):
            return names.of(x)
        if isinstance(x, (list, tuple)):
            inner = ", ".join(map(show, x))
            return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"
        if isinstance(x, torch.dtype):
            return dtype_text(x)
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return symbols.text(x)
        if isinstance(x, str) and x == program:
            name = next((n for n, p in programs.items() if p == x), f"P{len(programs) + 1}")
            programs[name] = x
            return name
        return "end" if isinstance(x, int) and x == END else repr(x)

    if node.op == "output":
        return f"return {show(node.args[0])}"
    given = [show(a) for a in node.args if not isinstance(a, torch.device)]
    given += [f"{k}={show(v)}" for k, v in sorted(node.kwargs.items()) if k not in _LEFT_OUT and v is not None]
    return f"{target_text(node)}({', '.join(given)})"


def _place(location: Location) -> str:
    file = location.file.replace("\\", "/").rpartition("/")[2]
    code = f"  {location.code}" if location.code else ""
    return f"{file}:{location.line}{code}"
