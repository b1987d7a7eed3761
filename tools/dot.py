"""A graph as a DOT text, and as SVG where Graphviz is installed."""

from __future__ import annotations

import shutil
import subprocess

import torch.fx as fx

from inductor_grpo.canonical import print_graph, program_of

REGION, PROGRAM, INPUT, PLAIN = "#f6c9b8", "#bfe3c6", "#d9e2f2", "#ffffff"


def dot(graph: fx.Graph, region: frozenset[str] = frozenset()) -> str:
    """DOT source; the nodes named in ``region`` are coloured, and so are calls of chunk programs."""
    printed = print_graph(graph)
    names = {line.node: line.name for line in printed.lines}
    lines = ["digraph graph_ {", '  node [shape=box, style="rounded,filled", fontname="monospace", fontsize=10];']
    for line in printed.lines:
        node = line.node
        colour = PROGRAM if program_of(node) else REGION if node.name in region else PLAIN
        colour = INPUT if node.op in ("placeholder", "output") and colour == PLAIN else colour
        head = line.call.partition("(")[0] if node.op == "call_function" else node.op
        where = f"\\n{line.location.code[:60]}" if line.location and line.location.code else ""
        label = _quoted(f"{line.name}\\n{head} {line.type}{where}")
        lines.append(f'  "{line.name}" [label={label}, fillcolor="{colour}"];')
        lines += [f'  "{names[a]}" -> "{line.name}";' for a in node.all_input_nodes]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def svg(source: str, seconds: int = 60) -> str | None:
    """The picture; None without the ``dot`` program, or when it takes too long."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-Tsvg"], input=source, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None
