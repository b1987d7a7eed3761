"""Peak of the resident set of a step on a CPU, above inputs and gradients: one process for each way and shape.

    python -m inductor_grpo.tools.bench_resident --loss grpo --dtype float32 --shape 8192,64,8000 --ways "eager ours"

``bench`` adds up what torch allocates; this sees what the machine has to hold.  Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch

from inductor_grpo.tools import bench_ways
from inductor_grpo.tools.bench_losses import LOSSES, Shape, Step, make_inputs
from inductor_grpo.tools.bench_measure import MIB, TRAINED


def resident_peak(function: Step, shape: Shape, dtype: torch.dtype) -> float:
    """MiB by which one step goes above its inputs and gradients; compiles on few tokens before it looks."""
    for tokens in (512, 513, shape.n):  # the second makes the number of tokens symbolic, as training does
        x = make_inputs(tokens, shape.h, shape.v, dtype, "cpu")
        for name in TRAINED:
            x[name].requires_grad_().grad = torch.zeros_like(x[name])
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forgets the peak so far
        with open("/proc/self/statm") as file:
            before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        loss = function(x)
        if loss.requires_grad:
            loss.backward()
    with open("/proc/self/status") as file:
        high = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return (high - before) / MIB


def main(argv: list[str] | None = None) -> int:
    """Prints one line for each shape."""
    parser = argparse.ArgumentParser(
        prog="bench_resident", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", required=True, help="tokens,hidden,vocabulary (repeat for more)")
    parser.add_argument("--loss", default="grpo", choices=sorted(LOSSES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ways", default="eager compile ours", help="separated by blanks, as of bench")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    dtype = getattr(torch, given.dtype)
    if given.one:
        shape = Shape.parse(given.shape[0])
        print(f"{resident_peak(bench_ways.make(given.ways, LOSSES[given.loss], shape), shape, dtype):.0f}")
        return 0
    # One arena and no thresholds that adapt: what is freed goes back, so that the peak is what was needed.
    fixed = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for text in given.shape:
        shape, cells = Shape.parse(text), []
        for way in given.ways.split():
            command = [sys.executable, "-m", "inductor_grpo.tools.bench_resident", "--one", "--ways", way]
            command += ["--shape", text, "--loss", given.loss, "--dtype", given.dtype]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **fixed}, check=False)
            value = done.stdout.split()[-1] if done.returncode == 0 else f"failed: {done.stderr.splitlines()[-1:]}"
            cells.append(f"{way} {value}")
        logits = shape.n * shape.v * dtype.itemsize / MIB
        print(f"{given.loss} {shape} {given.dtype}: one logits tensor {logits:.0f} MiB; peak MiB: {', '.join(cells)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
