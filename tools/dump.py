"""Numbered files of every compiled graph: each stage as text, as a script and as a picture, programs, code, report."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from pathlib import Path

import torch.fx as fx

from inductor_grpo.canonical import print_graph, program_of, program_text
from inductor_grpo.capture import Capture, CompiledGraph
from inductor_grpo.tools import explain
from inductor_grpo.tools.dot import dot, svg
from inductor_grpo.tools.script import script

IN_JOINT = ("joint", "normalised")


def dump(captured: Capture, folder: Path) -> tuple[list[Path], list[Path]]:
    """Writes everything under ``folder``; returns the files in order, and the folders of graphs that were kept.

    A graph that came from a cache has a report and nothing else: what an earlier dump knows of it stays beside that.
    What an earlier dump holds of further graphs goes, unless something of it was kept."""
    writers = [_Writer(folder / f"graph-{graph.number}", graph) for graph in captured.graphs]
    kept = [writer.folder for writer in writers if writer.keeps_earlier]
    written = [path for writer in writers for path in writer.write()]
    name = "cached_report" if kept else "report"
    report, data = folder / f"{name}.txt", folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    report.write_text(explain.as_text(captured), encoding="utf-8")
    data.write_text(explain.as_json(captured) + "\n", encoding="utf-8")
    if not kept:
        current = {writer.folder for writer in writers}
        for old in set(folder.glob("graph-*")) - current:
            _clear(old)
            with contextlib.suppress(OSError):  # it holds something else
                old.rmdir()
        for stale in folder.glob("cached_report.*"):
            stale.unlink()
    return [*written, report, data], kept


def _clear(folder: Path) -> None:
    for old in folder.iterdir():
        if old.is_file() and (re.match(r"\d\d_", old.name) or old.stem in ("report", "cached_report")):
            old.unlink()


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
        self.keeps_earlier = not graph.stages and any(self.folder.glob("*_joint.txt"))

    def write(self) -> list[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        graph, number = self.graph, 0
        if self.keeps_earlier:
            self._report("cached_report")
            return self.files
        _clear(self.folder)
        if graph.from_cache or not graph.stages:
            why = "came from Inductor's cache" if graph.from_cache else "never reached the pass"
            self._file(
                "00_no_graphs.txt",
                f"This graph {why}, so its stages were not built; dump without --cached compiles anew.\n",
            )
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
        self._report("report")
        return self.files

    def _report(self, name: str) -> None:
        notes = "".join(f"  note        {note}\n" for note in self.graph.notes)
        self._file(f"{name}.txt", f"{self.graph.report}\n{notes}")
        self._file(f"{name}.json", self.graph.report.to_json() + "\n")

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


def diff(a: Path, b: Path, exact: bool = False) -> list[str]:
    """The differences of two dumps, or of two files of dumps, as a unified diff of their canonical texts.

    What only the numbers of values or the comments with source lines tell apart is no difference, unless ``exact``.
    Raises FileNotFoundError where one is not there."""
    for path in (a, b):
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
    if a.is_dir() != b.is_dir():
        raise FileNotFoundError(f"{a} and {b} must both be folders or both be files")
    if not a.is_dir():
        return _diff_files(a, b, exact)
    names = {p.relative_to(root) for root in (a, b) for p in root.rglob("*.txt")}
    return [line for name in sorted(names) for line in _diff_files(a / name, b / name, exact)]


def _diff_files(a: Path, b: Path, exact: bool) -> list[str]:
    before, after = (p.read_text(encoding="utf-8").splitlines() if p.exists() else [] for p in (a, b))
    if not exact:
        before, after = aligned(before, after)
    return list(difflib.unified_diff(before, after, str(a), str(b), lineterm=""))


_COMMENT = re.compile(r"  # [^\n:]+:\d+(?:  .*)?$")
_VALUE = re.compile(r"%[A-Za-z_]\w*")
_NUMBER = re.compile(r"_\d+$")


def aligned(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Two canonical texts without comments, the values of the second named as those of the first that they match.

    Lines match by their shape, the operation and sizes with the numbers of values left out.  A value keeps its own name
    where no line of ``before`` is its like; then the name is marked, so that it cannot be taken for one of ``before``.
    """
    before, after = ([_COMMENT.sub("", line).rstrip() for line in lines] for lines in (before, after))
    shapes = [[_VALUE.sub(lambda m: _NUMBER.sub("", m.group()), line) for line in lines] for lines in (before, after)]
    names: dict[str, str] = {}
    for block in difflib.SequenceMatcher(None, *shapes, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            old, new = _defined(before[block.a + i]), _defined(after[block.b + i])
            if old and new:
                names[new] = old
    taken = {name for line in before if (name := _defined(line))}
    for line in after:
        name = _defined(line)
        if name and name not in names and name in taken:
            names[name] = f"{name}'"
    return before, [_VALUE.sub(lambda m: names.get(m.group(), m.group()), line) for line in after]


def _defined(line: str) -> str | None:
    name, equals, _ = line.partition(" : ")
    if not equals:
        name, equals, _ = line.partition(" = ")
    return name if equals and _VALUE.fullmatch(name) else None
