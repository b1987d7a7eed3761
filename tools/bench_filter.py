"""The gradient filter alone, on the gradient of log-probs in a vocabulary with the frequencies of a language: its
steps, the whole of it, and the two dense products that it stands for.

    python -m inductor_grpo.tools.bench_filter --shape 8192,4096,151936 --find 8192,32,4 4096,16,4 --pack 2048,4 512,16

Tiles of ``find`` are columns, warps and blocks that are read at once; those of ``pack``, which moves columns, and of
``move``, which moves rows, are columns and warps.  The first of each is used for all that comes after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from inductor_grpo import filter
from inductor_grpo.filter import launch
from inductor_grpo.filter.launch import Tile
from inductor_grpo.runtime import Sum, add_product
from inductor_grpo.tools.bench_kernel import timed
from inductor_grpo.tools.bench_losses import Shape


def gradient(shape: Shape, peaked: float, dtype: torch.dtype, device: str) -> Tensor:
    """``[n, v]``: the gradient of each row's log-prob of its label; see bench_losses.make_inputs for the logits."""
    g = torch.Generator(device).manual_seed(0)
    rank = 1 + torch.randperm(shape.v, generator=g, device=device)
    labels = torch.multinomial(1 / rank, shape.n, replacement=True, generator=g).unsqueeze(1)
    value = torch.empty(shape.n, shape.v, dtype=dtype, device=device)
    for part, label in zip(value.split(512), labels.split(512)):
        z = torch.randn(part.shape, generator=g, device=device) - rank.log()
        z.scatter_add_(1, label, torch.full_like(label, peaked, dtype=z.dtype))
        d = z.to(dtype).float().softmax(1).neg_()
        part.copy_(d.scatter_add_(1, label, torch.ones_like(label, dtype=d.dtype)))
    return value


def main(argv: list[str] | None = None) -> int:
    """Prints one line for each step."""
    parser = argparse.ArgumentParser(
        prog="bench_filter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse("qwen3-8b"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peaked", type=float, default=8.0)
    parser.add_argument("--eps", type=float, default=2.0**-12)
    parser.add_argument("--find", nargs="*", default=["8192,32,4"])
    parser.add_argument("--pack", nargs="*", default=["2048,4"])
    parser.add_argument("--move", nargs="*", default=["2048,4"])
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args(argv)
    shape, dtype, device = given.shape, getattr(torch, given.dtype), given.device
    value = gradient(shape, given.peaked, dtype, device)
    weight = torch.randn(shape.v, shape.h, dtype=dtype, device=device)
    hidden = torch.randn(shape.n, shape.h, dtype=dtype, device=device)
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def show(name: str, step: Callable[[], object]) -> None:
        print(f"{name:28s} {timed(lambda: void(step()), device, given.repeats):9.3f} ms")

    most = int(filter.MOST_LIVE * shape.v)
    for text in reversed(given.find):
        *tile, launch.FIND_PARTS = map(int, text.split(","))
        launch.FIND = Tile(*tile)
        show(f"find {text}", lambda: launch.find(value, given.eps, most))
    show("find, most are live", lambda: launch.find(value, given.eps, 0))
    parts = filter.live_parts(value, given.eps)
    if parts is None or parts[0].packed is None or parts[0].columns is None:
        print(f"no part is filtered: {launch.KERNELS.problem or 'most columns are live'}")
        return 0
    columns = parts[0].columns
    print(f"{columns.shape[0]} of {shape.v} columns are live")
    rows = launch.gather(weight, columns, columns.shape[0])
    width, sums = -(-columns.shape[0] // 64) * 64, torch.zeros(shape.n, device=device)
    for text in reversed(given.pack):
        launch.PACK = Tile(*map(int, text.split(",")))
        show(f"pack apart {text}", lambda: launch.pack(value, columns, width, sums, False))
    for text in reversed(given.move):
        launch.MOVE = Tile(*map(int, text.split(",")))
        show(f"gather rows {text}", lambda: launch.gather(weight, columns, width))
        show(f"scatter rows {text}", lambda: launch.scatter(rows, columns, of_weight))
    sum_of_weight: dict[int, Tensor] = {}
    show("sum of the weight's rows", lambda: weight.sum(0, dtype=torch.float32))
    show("zero the weight's gradient", of_weight.zero_)
    filter.pack(parts, value, owned=False)
    show("gradient of hidden", lambda: filter.contract(parts, value, weight, of_hidden, sum_of_weight))
    show("gradient of weight", lambda: filter.outer(parts, Sum(of_weight), value, hidden, False))

    def everything() -> None:
        found = filter.live_parts(value, given.eps)
        assert found is not None
        filter.contract(found, value, weight, of_hidden, {})
        filter.outer(found, Sum(of_weight), value, hidden, False)

    show("all of it", everything)
    show("dense gradient of hidden", lambda: torch.mm(value, weight, out=of_hidden))
    show("dense gradient of weight", lambda: add_product(Sum(of_weight), value.t(), hidden))
    show("pack in place", lambda: launch.pack(value, columns, width, sums, True))  # destroys it
    return 0


def void(_: object) -> None:
    """A step's result, freed before the next begins."""


if __name__ == "__main__":
    raise SystemExit(main())
