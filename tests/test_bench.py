"""``inductor-grpo bench``: a tiny run, its table, its file, what an interruption leaves, its yardstick."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_grpo.tools import bench, bench_measure, bench_output, bench_ways, cli
from inductor_grpo.tools.bench_losses import LOSSES, SHAPES, Shape, make_inputs

TINY = ["--device", "cpu", "--shape", "16,8,60", "--repeats", "2", "--quiet"]


def test_a_tiny_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every cell in the table, the file and the plot; a way that cannot do the work says so."""
    file, picture = tmp_path / "cells.jsonl", tmp_path / "cells.png"
    ways = "eager ours:codegen=eager linear-ce"
    words = ["bench", *TINY, "--dtype", "float32", "--loss", "cross-entropy", "--loss", "forward"]
    assert cli.main([*words, "--ways", ways, "-o", str(file), "--plot", str(picture)]) == 0
    cells = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(c["loss"], c["way"]) for c in cells] == [
        (loss, way) for loss in ("cross-entropy", "forward") for way in ways.split()
    ]
    for cell in cells:
        if cell["way"] == "linear-ce" and cell["loss"] != "cross-entropy":
            assert cell["status"] == "skipped" and "plain cross entropy" in cell["reason"]
        elif cell["way"] != "linear-ce" or hasattr(torch.nn, "LinearCrossEntropyOptions"):
            assert cell["status"] == "ok", cell["reason"]
            assert 0 < cell["low"] <= cell["ms"] <= cell["high"] and cell["repeats"] == 2
            assert math.isclose(cell["ratio"], cell["ms"] / cell["floor_ms"])
            assert list(cell["errors"]) == (["value"] if cell["loss"] == "forward" else ["value", "hidden", "weight"])
            assert max(cell["errors"].values()) < 1e-5
            assert cell["peak_mib"] > 0
    assert [c["note"].partition(",")[0] for c in cells if c["way"].startswith("ours")] == ["one-pass", "forward"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capfd.readouterr().out
    assert out.count("floor") == 2 * 2 and "forward 16x8x60 float32 cpu" in out


def test_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What is finished is shown and kept; --resume measures the rest alone."""
    file, measured = tmp_path / "cells.jsonl", []
    make = bench_ways.make

    def interrupted(name: str, *rest: Any) -> Any:
        measured.append(name)
        if name == "trl" and len(measured) == 2:
            raise KeyboardInterrupt
        return make(name, *rest)

    monkeypatch.setattr(bench_ways, "make", interrupted)
    words = [*TINY, "--no-error", "--ways", "eager trl linear-ce", "-o", str(file)]
    assert bench.main(words) == bench.INTERRUPTED
    shown = capfd.readouterr()
    assert "interrupted after 1 cells" in shown.err and "eager" in shown.out
    with file.open("a") as half:
        half.write('{"loss": "grpo", "sha')
    assert [c.way for c in bench_output.read(file)] == ["eager"]
    assert bench.main([*words, "--resume"]) == 0
    assert measured == ["eager", "trl", "trl", "linear-ce"]


def test_a_failure_is_a_cell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others are measured, and the exit code tells."""
    assert bench.main([*TINY, "--loss", "gspo", "--shape", "15,8,60", "--ways", "eager", "--no-error"]) == bench.FAILED
    out = capfd.readouterr().out
    assert "failed: RuntimeError" in out and out.count("\neager") == 2


@pytest.mark.parametrize(
    "words", [["--ways", "theirs"], ["--ways", "ours:chunk_bytes=-1"], ["--shape", "1,2"], ["--loss", "dpo"]]
)
def test_what_cannot_be_understood(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main(words)
    assert left.value.code == 2
    assert words[0] in capfd.readouterr().err


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick is the loss itself, in more parts than one."""
    x = make_inputs(600, 4, 30, torch.float64, "cpu", live=0.7)
    x = {k: t.double() if t.is_floating_point() else t for k, t in x.items()}
    shape, loss = Shape(600, 4, 30, 5.0), LOSSES[name]
    for trained in ("hidden", "weight") if loss.training else ():
        x[trained].requires_grad_()
    found = bench_measure.results(lambda given: loss.function(given, shape.soft_cap), x)
    assert max(bench_measure.errors(found, bench_measure.exact(loss, shape, x)).values()) < 1e-12


def test_peak_of_a_cpu() -> None:
    """Two tensors of 4 MiB that live at once, then one of 2."""

    def run() -> None:
        a = torch.ones(1024, 1024)
        b = a + 1
        del a, b
        torch.ones(512, 1024)

    assert 8 <= bench_measure.peak_mib(run, "cpu") < 9


def test_shapes() -> None:
    assert Shape.parse("gemma") is SHAPES["gemma"]
    assert Shape.parse("1,2,3,4.5") == Shape(1, 2, 3, 4.5)
    assert str(Shape.parse("1,2,3,4.5")) == "1x2x3 soft-cap 4.5"
