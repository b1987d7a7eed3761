"""The chunk body of a loss alone, without matmuls: as Inductor generates it, and as a row kernel with tiles of several
widths.

    python -m inductor_grpo.tools.bench_kernel --loss grpo --rows 4096 --columns 151936 --tiles 2048,8,1 2048,8,4

*reads* is what the memory needs for the least traffic (the logits read once and, with gradients, written once) at the
bandwidth of a device copy of the same size, measured beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from inductor_grpo import body as bodies
from inductor_grpo.body import Body
from inductor_grpo.row_kernel import launch
from inductor_grpo.row_kernel.text import Tile
from inductor_grpo.tools import bench_ways
from inductor_grpo.tools.bench_losses import LOSSES, Shape, make_inputs
from inductor_grpo.tools.bench_measure import step_of, wait


def body_of(loss: str, columns: int, dtype: torch.dtype, device: str, codegen: str) -> Body:
    """The body that the last program of a loss runs."""
    shape = Shape(256, 64, columns)
    x = make_inputs(shape.n, shape.h, shape.v, dtype, device)
    for name in ("hidden", "weight") if LOSSES[loss].training else ():
        x[name].requires_grad_()
    way = f"ours:row_kernel=on,disable=tiles,codegen={codegen}"
    step_of(bench_ways.make(way, LOSSES[loss], shape), x)()
    return bodies.cached()[-1]


class Chunk:
    """Arguments of one run of a body over ``rows`` rows."""

    def __init__(self, body: Body, rows: int, columns: int) -> None:
        self.body, self.rows = body, rows
        program, uses = body.program, body.uses
        made = [self._tensor(spec, columns) for spec in body.specs]
        counts = (len(program.projections), len(uses.rows), len(uses.whole))
        self.logits = made[: counts[0]]
        self.inputs = made[counts[0] : sum(counts[:2])]
        self.whole = made[sum(counts[:2]) : sum(counts)]
        self.targets = made[sum(counts) :]
        self.widths = dict.fromkeys(body.plan.operands, columns)

    def _tensor(self, spec: bodies.codegen.TensorSpec, columns: int) -> Tensor:
        sizes = [self.rows if size is None else size for size in spec.shape]
        if spec.dtype == torch.int64:
            return torch.randint(0, columns, sizes, device=spec.device)
        return torch.randn(sizes, device=spec.device).to(spec.dtype)

    def run(self) -> None:
        """One run; gradients lie over the logits afterwards, which costs the next run nothing."""
        self.body.run(self.rows, self.logits, self.inputs, self.whole, (), self.targets, self.widths)


def timed(run: Callable[[], None], device: str, repeats: int) -> float:
    """Median milliseconds after two runs."""
    times = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def main(argv: list[str] | None = None) -> int:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(
        prog="bench_kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", default="grpo", choices=list(LOSSES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--tiles", nargs="*", default=["2048,8,1", "1024,4,4", "2048,8,2", "2048,8,4", "4096,16,4"])
    parser.add_argument("--codegen", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(argv)
    body = body_of(given.loss, given.columns, getattr(torch, given.dtype), given.device, given.codegen)
    chunk = Chunk(body, given.rows, given.columns)
    other = torch.empty_like(chunk.logits[0])

    def copied() -> None:
        other.copy_(chunk.logits[0])

    copy = timed(copied, given.device, given.repeats)
    least = copy if body.plan.operands else copy / 2
    print(f"{given.loss} {given.rows}x{given.columns} {given.dtype}: least traffic {least:.3f} ms")
    why = body.no_row_kernel
    body.no_row_kernel = "timed without"
    print(f"{'generated':24s} {timed(chunk.run, given.device, given.repeats):9.3f} ms")
    if why is not None:
        print(f"no row kernel: {why}")
        return 0
    for text in given.tiles:
        launch.TILE = Tile(*map(int, text.split(",")))
        body.reset_row_kernel()
        ms = timed(chunk.run, given.device, given.repeats)
        print(f"{f'row kernel {text}':24s} {ms:9.3f} ms  {body.no_row_kernel or ''}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
