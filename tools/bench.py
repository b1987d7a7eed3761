"""Time, memory and error of a loss: eager, compiled by stock torch, by this package and by others, beside the matmuls.

    inductor-grpo bench --shape qwen3-8b --loss grpo --loss gspo
    python -m inductor_grpo.tools.bench --device cuda --shape 8192,4096,151936 --ways "eager compile ours"

The ways of a table run one after the other in one process.  Each finished cell is a line of the output file at once, so
that a run that is interrupted keeps what it has, and --resume goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inductor_grpo.tools import bench_measure as measure
from inductor_grpo.tools import bench_output as output
from inductor_grpo.tools import bench_ways
from inductor_grpo.tools.bench_losses import LOSSES, SHAPES, Inputs, Shape, make_inputs
from inductor_grpo.tools.bench_output import Cell

FAILED, INTERRUPTED = 3, 130


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"here: {device}")
    parser.add_argument(
        "--shape",
        action="append",
        type=_argument(Shape.parse),
        metavar="SHAPE",
        help=f"tokens,hidden,vocabulary[,soft cap], or one of {', '.join(SHAPES)}; may be repeated",
    )
    parser.add_argument("--loss", action="append", choices=list(LOSSES), help="may be repeated; by default grpo")
    parser.add_argument(
        "--dtype", action="append", choices=("bfloat16", "float16", "float32", "float64"), help="may be repeated"
    )
    ways = " ".join(bench_ways.DEFAULT[device])
    parser.add_argument(
        "--ways",
        type=_argument(lambda text: [bench_ways.check(name) for name in text.split()]),
        help=f"separated by blanks, ours:option=value,... sets options; here: {ways}",
    )
    parser.add_argument("--live", type=float, default=1.0, help="share of unmasked tokens (masked, gspo, gspo-packed)")
    parser.add_argument(
        "--peaked", type=float, default=0.0, help="a label's logit above the others' mean: 0, or say 14"
    )
    parser.add_argument("--repeats", type=int, default=5, help="calls that are timed")
    parser.add_argument("--no-error", action="store_true", help="do not compare with float64")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="file to append a line of JSON a cell to")
    parser.add_argument("--resume", action="store_true", help="take over the cells that the output file has")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="picture of the cells (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


class Bench:
    """One run of the command; ``cells`` are those that are finished."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.cells: list[Cell] = []
        self.known: dict[tuple[object, ...], Cell] = {}
        if given.resume and given.output is not None and given.output.exists():
            old = output.read(given.output)
            self.known = {(*c.work, c.way, c.torch): c for c in old if c.status != "failed"}
        self.works = [
            (loss, dtype, shape)
            for shape in given.shape or [SHAPES["cpu" if given.device == "cpu" else "qwen3-8b"]]
            for dtype in given.dtype or ["bfloat16"]
            for loss in given.loss or ["grpo"]
        ]
        self.ways = given.ways or bench_ways.DEFAULT[given.device]
        self.started, self.done = time.perf_counter(), 0

    def run(self) -> int:
        """Prints a table for each work; the exit code."""
        code = 0
        try:
            for work in self.works:
                before = len(self.cells)
                try:
                    self._table(*work)
                finally:
                    if self.cells[before:]:
                        print(output.table(self.cells[before:]), flush=True)
        except KeyboardInterrupt:
            kept = f", the others are in {self.given.output}" if self.given.output else ""
            print(f"bench: interrupted after {len(self.cells)} cells{kept}", file=sys.stderr)
            code = INTERRUPTED
        if self.given.plot and any(c.status == "ok" for c in self.cells):
            output.plot(self.cells, self.given.plot)
            print(self.given.plot)
        own = [c for c in self.cells if c.status == "failed" and c.way.split(":")[0] in ("eager", "compile", "ours")]
        return code or (FAILED if own else 0)

    def _table(self, loss: str, dtype: str, shape: Shape) -> None:
        given = self.given
        blank = Cell(loss, str(shape), dtype, given.device, given.live, "", torch.__version__, float("nan"))
        blank.peaked = given.peaked
        taken = {way: self.known.get((*blank.work, way, blank.torch)) for way in self.ways}
        if all(taken.values()):
            self.cells += [cell for cell in taken.values() if cell is not None]
            self.done += len(taken)
            return
        training = LOSSES[loss].training
        self._say(f"{loss} {shape} {dtype}: inputs")
        x = make_inputs(shape.n, shape.h, shape.v, getattr(torch, dtype), given.device, given.live, given.peaked)
        floor = measure.floor(x, training)
        right: dict[str, Tensor] = {}
        if not given.no_error:
            self._say(f"{loss} {shape} {dtype}: the step in float64")
            right = measure.exact(LOSSES[loss], shape, x)
        for name in measure.TRAINED if training else ():
            x[name].requires_grad_()
        for way in self.ways:
            cell = taken[way]
            if cell is None:
                self._say(f"{loss} {shape} {dtype}: {way}")
                cell = dataclasses.replace(blank, way=way, errors={})
                self._measure(cell, loss, shape, x, right, floor)
                if given.output is not None:
                    with given.output.open("a", encoding="utf-8") as file:
                        file.write(cell.line())
            self.cells.append(cell)
            self.done += 1

    def _measure(
        self,
        cell: Cell,
        loss: str,
        shape: Shape,
        x: Inputs,
        right: dict[str, Tensor],
        floor: Callable[[], object],
    ) -> None:
        """Fills a cell in."""
        device, repeats = self.given.device, self.given.repeats
        try:
            function = bench_ways.make(cell.way, LOSSES[loss], shape)
            run = measure.step_of(function, x)
            time_of = measure.timed(run, floor, device, repeats)
            cell.peak_mib = measure.peak_mib(run, device)
            cell.extra_mib = cell.peak_mib - measure.gradients_mib(x)
            cell.errors = measure.errors(measure.results(function, x), right) if right else {}
        except bench_ways.Skipped as reason:
            cell.status, cell.reason = "skipped", str(reason)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            cell.status, cell.reason = "failed", f"{type(error).__name__}: {first[:200]}"
        else:
            cell.ms, cell.low, cell.high, cell.first_s = time_of.ms, time_of.low, time_of.high, time_of.first_s
            cell.repeats, cell.floor_ms, cell.note = repeats, time_of.floor_ms, bench_ways.note(cell.way)
            cell.ratio = cell.ms / cell.floor_ms
        for name in measure.TRAINED:
            x[name].grad = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()

    def _say(self, what: str) -> None:
        if not self.given.quiet:
            elapsed, cells = time.perf_counter() - self.started, len(self.works) * len(self.ways)
            print(f"[bench] {self.done}/{cells} cells, {elapsed:.0f} s: {what}", file=sys.stderr, flush=True)


def run(given: argparse.Namespace) -> int:
    """The command, with parsed options; returns the exit code."""
    return Bench(given).run()


def main(argv: list[str] | None = None) -> int:
    """The command of its own."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
