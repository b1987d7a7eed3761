"""Row kernels of chunk bodies: made once a body and device, launched once a chunk."""

from __future__ import annotations

import hashlib
import linecache
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import codegen
from ..seam import launch as triton
from . import text
from .recognise import RowPlan, Unfit, recognise
from .text import Inputs, Store, Tile

log = logging.getLogger("inductor_grpo")

# Of those that tools.bench_kernel compares, the fastest on an H200 for log-probs, and next to it for the rest.
TILE = Tile(1024, 4, 4)


def available(device: torch.device) -> bool:
    """Whether kernels can run on tensors of ``device``: CUDA with Triton, or the CPU in Triton's interpreter."""
    return triton.available() and (device.type == "cuda" or triton.interpreted())


def _interpreted() -> bool:
    return triton.available() and triton.interpreted()


def tile_of(columns: int) -> Tile:
    """How a row of so many columns is cut."""
    wide = min(TILE.columns, max(16, 1 << (columns - 1).bit_length()))
    return Tile(wide, max(1, min(TILE.warps, wide // 128)), min(TILE.parts, -(-columns // wide)))


class RowKernel:
    """The kernel of one body.

    ``body(n, *syms, *logits, *rows, *whole)`` gives the values, in the order of ``stores``; one that is None has memory
    of its own in the value's dtype.  Raises Unfit where the body has no row kernel; the message is for people.
    """

    def __init__(
        self,
        body: Callable[..., Sequence[Any]],
        symbols: Sequence[tuple[str, int]],
        specs: Sequence[codegen.TensorSpec],
        counts: tuple[int, int, int, int],
        stores: Sequence[Store | None],
        device: torch.device,
    ) -> None:
        self.plan: RowPlan = recognise(body, symbols, specs, counts)
        self.inputs = Inputs.of(specs, *counts[1:], device)
        self.stores = tuple(
            Store(out.meta["val"].dtype) if store is None else store for store, out in zip(stores, self.plan.outputs)
        )
        self.device = device
        self.tile = tile_of(self.plan.columns)
        self.reads = text.read(self.plan)
        self.filled = text.filled(self.plan, self.stores)
        """The outputs of which the kernel tells whether their rows are live."""
        written = text.write(self.plan, self.inputs, self.stores, self.tile, _interpreted())
        self.source = written.source
        self.checked = written.checked
        """The logits, by place, that are finite in a row that is not live."""
        self.skips = written.skips
        """Whether rows can be left out of the last pass."""
        self._function: Any = None

    def __call__(
        self,
        n: int,
        syms: Sequence[int],
        logits: Sequence[Tensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        results: Sequence[Tensor],
        skips: bool = False,
    ) -> list[Tensor]:
        """Runs ``n`` rows; ``results`` are the tensors of the stores that have memory of their own.

        Returns for each of ``filled`` an int8 tensor ``[n]``, 0 where the row is not live: its elements are all zero
        and its ``checked`` logits finite.  With ``skips`` such a row may not have been written.
        """
        given: dict[str, Sequence[Any]] = {"logits": logits, "rows": rows, "whole": whole, "syms": syms}
        arguments = [given[leaf.kind][leaf.place] for leaf in self.reads]
        for k, leaf in enumerate(self.reads):
            if leaf.kind == "whole" and self.inputs.host[leaf.place]:
                arguments[k] = arguments[k].item()
        live = [torch.empty(n, dtype=torch.int8, device=self.device) for _ in self.filled]
        arguments += [*results, *live, *([int(skips)] if self.skips else [])]
        if self.device.type != "cuda":
            self.function[(n, 1, 1)](*arguments)
            return live
        with torch.cuda.device(self.device):
            self.function[(n, 1, 1)](
                *arguments,
                num_warps=self.tile.warps,
                debug=True,  # device assertions, as in Inductor's kernels
                sanitize_overflow=False,
                enable_fp_fusion=False,  # products are rounded before they are added, as in eager
            )
        return live

    @property
    def function(self) -> Any:
        """The Triton function."""
        if self._function is None:
            name = f"<inductor_grpo rows {hashlib.sha256(self.source.encode()).hexdigest()[:16]}>"
            log.debug("%s\n%s", name, self.source)
            # Triton reads the source through inspect, which finds it in linecache: no file to share or to clean.
            linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
            names: dict[str, Any] = {"__name__": __name__}
            exec(compile(self.source, name, "exec", dont_inherit=True), names)
            self._function = names["rows_of"]
        return self._function


__all__ = ["RowKernel", "Store", "Unfit", "available"]
