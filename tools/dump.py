"""Numbered files of every compiled graph: each stage as text, as a script and as a picture, programs, code, report."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import torch.fx as fx

from inductor_grpo.canonical import print_graph, program_of, program_text
from inductor_grpo.capture import Capture, CompiledGraph
from inductor_grpo.tools import explain
from inductor_grpo.tools.dot import dot, svg
from inductor_grpo.tools.script import script

IN_JOINT = ("joint", "normalised")


def dump(captured: Capture, folder: Path) -> list[Path]:
    """Writes everything under ``folder`` and returns the files in order."""
    written: list[Path] = []
    for graph in captured.graphs:
        written += _Writer(folder / f"graph-{graph.number}", graph).write()
    report = folder / "report.txt"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(explain.as_text(captured), encoding="utf-8")
    data = folder / "report.json"
    data.write_text(explain.as_json(captured) + "\n", encoding="utf-8")
    return [*written, report, data]


def region_of(graph: CompiledGraph) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the nodes that the rewrite took out, and of those that it put in; both empty without a rewrite."""
    before, after = graph.stage("normalised"), graph.stage("rewritten")
    if before is None or after is None:
        return frozenset(), frozenset()
    old, new = {n.name for n in before.nodes}, {n.name for n in after.nodes}
    return frozenset(old - new), frozenset(new - old)


class _Writer:
    def __init__(self, folder: Path, graph: CompiledGraph) -> None:
        self.folder, self.graph = folder, graph
        self.files: list[Path] = []

    def write(self) -> list[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():  # of an earlier dump
            old.unlink()
        graph, number = self.graph, 0
        if graph.from_cache or not graph.stages:
            why = "came from Inductor's cache" if graph.from_cache else "never reached the pass"
            self._file("00_no_graphs.txt", f"This graph {why}, so its stages were not built; --fresh compiles anew.\n")
        removed, added = region_of(graph)
        for number, stage in enumerate(graph.stages):
            region = removed if stage.name in IN_JOINT else added
            self._stage(f"{number:02}_{stage.name}", stage.graph, region)
        number = len(graph.stages)
        for index, text in enumerate(_programs(graph)):
            self._file(f"{number:02}_program-{index + 1}.txt", program_text(text) + "\n")
            self._file(f"{number:02}_program-{index + 1}.json", json.dumps(json.loads(text), indent=2) + "\n")
        for part, source in graph.code.items():
            number += 1
            self._file(f"{number:02}_code_{part}.py", source)
        self._file("report.txt", f"{graph.report}\n" + "".join(f"  note        {note}\n" for note in graph.notes))
        self._file("report.json", graph.report.to_json() + "\n")
        return self.files

    def _stage(self, name: str, graph: fx.Graph, region: frozenset[str]) -> None:
        self._file(f"{name}.txt", print_graph(graph).text())
        try:
            source = script(graph, f"{name} of graph {self.graph.number}", f"{name}.py", self.graph.stage("joint"))
        except ValueError as error:
            source = f"# Not to be rebuilt: {error}\n"
        self._file(f"{name}.py", source)
        drawing = dot(graph, region)
        self._file(f"{name}.dot", drawing)
        picture = svg(drawing)
        if picture is not None:
            self._file(f"{name}.svg", picture)

    def _file(self, name: str, content: str) -> None:
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        self.files.append(path)


def _programs(graph: CompiledGraph) -> list[str]:
    stage = graph.stage("rewritten")
    found = [program_of(node) for node in stage.nodes] if stage is not None else []
    return list(dict.fromkeys(text for text in found if text is not None))


def diff(a: Path, b: Path) -> list[str]:
    """The differences of two dumps, or of two files of dumps, as a unified diff of their canonical texts.

    Raises FileNotFoundError where one is not there."""
    for path in (a, b):
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
    if a.is_dir() != b.is_dir():
        raise FileNotFoundError(f"{a} and {b} must both be folders or both be files")
    if not a.is_dir():
        return _diff_files(a, b)
    names = {p.relative_to(root) for root in (a, b) for p in root.rglob("*.txt")}
    return [line for name in sorted(names) for line in _diff_files(a / name, b / name)]


def _diff_files(a: Path, b: Path) -> list[str]:
    before, after = (p.read_text(encoding="utf-8").splitlines() if p.exists() else [] for p in (a, b))
    return list(difflib.unified_diff(before, after, str(a), str(b), lineterm=""))
