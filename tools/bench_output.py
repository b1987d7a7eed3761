"""What ``bench`` shows of its cells: tables, a plot, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAY_WIDTH = 34


@dataclasses.dataclass
class Cell:
    """One way on one work.

    ``status`` is "ok", "skipped" (cannot do this work here) or "failed", with the ``reason``; without "ok" the numbers
    are None.  Times are milliseconds: median, least, most; ``ratio`` is to the matmuls alone, ``floor_ms``, timed
    in turn with this way.
    ``peak_mib`` is above the inputs, ``extra_mib`` above inputs and gradients.  ``errors``: of value and gradients
    against float64, relative.
    """

    loss: str
    shape: str
    dtype: str
    device: str
    live: float
    way: str
    torch: str
    floor_ms: float
    status: str = "ok"
    reason: str = ""
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    first_s: float | None = None
    repeats: int = 0
    ratio: float | None = None
    peak_mib: float | None = None
    extra_mib: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    peaked: float = 0.0

    @property
    def work(self) -> tuple[str, str, str, str, float, float]:
        """What is measured; cells of one work are one table."""
        return self.loss, self.shape, self.dtype, self.device, self.live, self.peaked

    def line(self) -> str:
        """The cell as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


def read(path: Path) -> list[Cell]:
    """The cells of a file, whose last line may be cut off."""
    cells = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data: dict[str, Any] = json.loads(line)
            cells.append(Cell(**data))
        except (json.JSONDecodeError, TypeError):
            continue
    return cells


def table(cells: Sequence[Cell]) -> str:
    """The cells of one work, as text."""
    first = cells[0]
    more = (f" live {first.live:g}" if first.live < 1 else "") + (f" peaked {first.peaked:g}" if first.peaked else "")
    work = f"{first.loss} {first.shape} {first.dtype} {first.device}{more}"
    lines = [
        f"{work}, torch {first.torch}",
        f"{'way':{WAY_WIDTH}s} {'ms':>9s} {'spread':>17s} {'floor ms':>9s} {'x floor':>8s} {'extra MiB':>9s}"
        "  error: value, gradients",
    ]
    return "\n".join([*lines, *map(_row, cells)]) + "\n"


def _row(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.way:{WAY_WIDTH}s} {cell.status}: {cell.reason}"
    numbers = f"{cell.ms:9.2f} {f'{cell.low:.1f}-{cell.high:.1f}':>17s} {cell.floor_ms:9.2f} {cell.ratio:8.2f}"
    errors = " ".join(f"{error:.1e}" for error in cell.errors.values())
    note = f"  ({cell.note})" if cell.note else ""
    extra = cell.extra_mib or 0.0
    memory = f"{extra:9.0f}" if extra >= 10 else f"{extra:9.2f}"
    return f"{cell.way:{WAY_WIDTH}s} {numbers} {memory}  {errors}{note}"


def tables(cells: Sequence[Cell]) -> dict[tuple[Any, ...], list[Cell]]:
    """The cells by work, in the order in which works first occur."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.work, []).append(cell)
    return found


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Time over memory, one panel a work: the nearer to the lower left corner, the better.

    Raises ImportError without matplotlib, ValueError where there is nothing to show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = [[c for c in some if c.status == "ok"] for some in tables(cells).values()]
    works = [some for some in works if some]
    if not works:
        raise ValueError("there is no finished cell to plot")
    figure, axes = pyplot.subplots(len(works), 2, figsize=(11, 1.2 + sum(0.6 + 0.28 * len(w) for w in works)))
    for (left, right), some in zip(axes.reshape(-1, 2), works):
        names = [c.way for c in some]
        colours = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        ratios = [c.ratio or 0.0 for c in some]
        spread = [[(c.ms - c.low) / c.floor_ms, (c.high - c.ms) / c.floor_ms] for c in some]  # type: ignore[operator]
        left.barh(names, ratios, color=colours, xerr=list(zip(*spread)))
        left.axvline(1.0, color="black", linewidth=0.8)
        left.set_xlabel("time / matmuls alone")
        left.set_title(f"{some[0].loss} {some[0].shape} {some[0].dtype}", fontsize=9, loc="left")
        right.barh(names, [max(c.extra_mib or 0.0, 0.0) for c in some], color=colours)
        right.set_xlabel("MiB above inputs and gradients")
        right.set_yticklabels([])
        for axis in (left, right):
            axis.invert_yaxis()
            axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
