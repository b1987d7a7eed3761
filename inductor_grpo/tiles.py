"""The loop over vocabulary tiles: what ``inductor_grpo::tiles`` does when it runs.

Memory is one ``[rows, tile]`` buffer of logits.  All rows are taken at once while a tile of useful width fits the
bound; then each column of the weight is read once, and its gradient needs no sum over chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_grpo import body as bodies
from inductor_grpo import online, runtime
from inductor_grpo._compat import codegen
from inductor_grpo.program import Sink, TileProgram

HINTS = (1024, 2048)  # rows and start that a step is tuned for
MAX_VARIANTS = 4


def run(
    rows: Sequence[Tensor], whole: Sequence[Tensor], n: int, syms: Sequence[int], text: str, chunk_bytes: int, mode: str
) -> list[Tensor]:
    """Runs the tile program ``text``; see :mod:`inductor_grpo.ops` for the arguments."""
    program = TileProgram.from_text(text)
    device = next(t.device for t in (*rows, *whole))
    with torch.no_grad(), torch.autocast(device.type, enabled=False), codegen.plain_functions():
        return _Tiles(program, text, rows, whole, n, tuple(syms), device, mode).run(chunk_bytes)


def check_hits(hits: Tensor, columns: int) -> None:
    """Raises what gather raises for an index outside of ``[0, columns)``, which no tile had; on CUDA an assertion of
    the device."""
    found = (hits == 1).all()
    message = f"index out of bounds: a label is not in [0, {columns})"
    if hits.device.type != "cpu":
        torch._assert_async(found, message)
    elif not bool(found):
        raise RuntimeError(message)


def _fitting(fill: float, kind: torch.dtype) -> float | int | bool:
    """``fill``, or what stands for an infinity in a dtype that has none."""
    if kind.is_floating_point or fill == 0:
        return fill
    if kind is torch.bool:
        return fill > 0
    return torch.iinfo(kind).max if fill > 0 else torch.iinfo(kind).min


@dataclasses.dataclass
class _Tiles:
    program: TileProgram
    text: str
    rows: Sequence[Tensor]
    whole: Sequence[Tensor]
    n: int
    syms: tuple[int, ...]
    device: torch.device
    mode: str

    def run(self, chunk_bytes: int) -> list[Tensor]:
        """The results of the sinks."""
        program, n = self.program, self.n
        columns = self.whole[program.projections[0].weight].shape[1]
        outputs = [
            torch.zeros(
                runtime.shape(s, self.rows, self.whole, n, self.syms), dtype=self._sum_dtype(s), device=self.device
            )
            for s in program.sinks
        ]
        height, width = self._tile_shape(columns, chunk_bytes)
        for first in range(0, n, height):
            self._row_block(first, min(first + height, n), columns, width, outputs)
        return [out.to(runtime.dtype(s.dtype)) for out, s in zip(outputs, program.sinks, strict=True)]

    def _sum_dtype(self, sink: Sink) -> torch.dtype:
        result = runtime.dtype(sink.dtype)
        if sink.kind == "row":
            return result
        # The gradient of hidden is a sum over tiles here, so it needs the running sum that a weight's gradient has.
        return torch.promote_types(runtime.dtype(sink.accumulate) if sink.kind != "contract" else torch.float32, result)

    def _tile_shape(self, columns: int, chunk_bytes: int) -> tuple[int, int]:
        """Rows and columns of a tile of at most ``chunk_bytes`` (but one element at least)."""
        size = max(self.rows[p.hidden].element_size() for p in self.program.projections)
        cells = max(1, (chunk_bytes or runtime.default_tile_bytes(self.device.type)) // size)
        width = max(1, min(columns, runtime.tile_columns(self.device.type), cells))
        return max(1, min(self.n, cells // width)), width

    def _row_block(self, first: int, last: int, columns: int, width: int, outputs: list[Tensor]) -> None:
        program, n = self.program, last - first
        rows = [r[first:last] for r in self.rows]
        kept = [
            torch.full((n, 1), _fitting(fill, kind), dtype=kind, device=self.device) for fill, kind in self._initial()
        ]
        for start in range(0, columns, width):
            stop = min(start + width, columns)
            logits = []
            for p in program.projections:
                hidden, weight = rows[p.hidden], self.whole[p.weight][:, start:stop]
                logits.append(
                    hidden @ weight if p.bias is None else torch.addmm(self.whole[p.bias][start:stop], hidden, weight)
                )
            tile_rows = [r[:, start:stop] if i in program.sliced_rows else r for i, r in enumerate(rows)]
            tile_whole = [w[:, start:stop] if i in program.sliced_whole else w for i, w in enumerate(self.whole)]
            kept, wide = self._step(n, start, stop - start, logits, tile_rows, tile_whole, kept)
            for out, sink in zip(outputs, program.sinks, strict=True):
                self._add(out, sink, wide, rows, slice(first, last), slice(start, stop))
            del logits, wide
        kinds = [kind for kind, _, _ in self._kept() for _ in range(online.STATISTICS[kind])]
        for kind, tensor in zip(kinds, kept, strict=True):
            if kind == "hit":
                check_hits(tensor, columns)
        values = bodies.load(program.finish, "finish")(n, self._statistics(kept), rows, self.whole, self.syms)
        for out, sink in zip(outputs, program.sinks, strict=True):
            if sink.kind == "row":
                out[first:last] = values[sink.value]

    def _kept(self) -> list[tuple[str, torch.dtype, torch.dtype]]:
        """Kind, dtype and running dtype of each result that keeps statistics."""
        found = []
        for result in self.program.results:
            kind, name = result.split("/")
            if kind != "wide":
                own = runtime.dtype(name)
                found.append((kind, own, torch.float32 if own.is_floating_point and own.itemsize < 4 else own))
        return found

    def _initial(self) -> list[tuple[float, torch.dtype]]:
        return [(fill, running) for kind, _, running in self._kept() for fill in online.initial(kind)]

    def _statistics(self, kept: list[Tensor]) -> list[Tensor]:
        """The running statistics in the dtypes that the user's code had."""
        dtypes = [own for kind, own, _ in self._kept() for _ in range(online.STATISTICS[kind])]
        return [tensor.to(own) for tensor, own in zip(kept, dtypes, strict=True)]

    def _add(self, out: Tensor, sink: Sink, wide: list[Tensor], rows: list[Tensor], block: slice, tile: slice) -> None:
        """Adds what one tile gives to a gradient."""
        if sink.kind == "row":
            return
        value = wide[sink.value]
        if sink.kind == "total":
            out[:, tile] += value.sum(0, keepdim=True, dtype=out.dtype)
        elif sink.kind == "contract":
            runtime.add_product(runtime.Sum(out[block], empty=False), value, self.whole[sink.input][tile])
        elif sink.kind == "outer":
            runtime.add_product(runtime.Sum(out[tile], empty=False), value.t(), rows[sink.input])
        else:
            runtime.add_product(runtime.Sum(out[:, tile], empty=False), rows[sink.input].t(), value)

    def _step(
        self,
        n: int,
        start: int,
        columns: int,
        logits: list[Tensor],
        rows: list[Tensor],
        whole: list[Tensor],
        kept: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One tile: statistics merged into those of the tiles before, and the wide results."""
        uses = bodies.Uses.of(self.program.tile, len(rows), len(whole), len(self.syms))
        tensors = [*logits, *(rows[i].contiguous() for i in uses.rows), *(whole[i] for i in uses.whole), *kept]
        flat = functools.partial(_flat, self.text, columns, uses, len(logits))
        outputs = None
        if self.mode == "inductor":
            key = (
                self.text,
                columns,
                self.device,
                tuple((t.shape[1:], t.dtype) for t in tensors),
                tuple(w.stride() for w in whole),
            )
            compiled = _STEPS.setdefault(key, _Steps()).get(
                flat, (n, start, *(self.syms[i] for i in uses.syms)), uses, len(logits), tensors
            )
            outputs = (
                compiled([n, start, *(self.syms[i] for i in uses.syms), *tensors]) if compiled is not None else None
            )
        if outputs is None:
            outputs = flat(n, start, *(self.syms[i] for i in uses.syms), *tensors)
        outputs = list(outputs)
        return outputs[: len(kept)], outputs[len(kept) :]


def _flat(text: str, columns: int, uses: bodies.Uses, projections: int, n: Any, start: Any, *args: Any) -> list[Tensor]:
    """A step over one flat argument list, as it is traced: syms, logits, rows, whole, statistics so far."""
    program = TileProgram.from_text(text)
    parts: list[Sequence[Any]] = []
    at = 0
    for count in (len(uses.syms), projections, len(uses.rows), len(uses.whole), len(args)):
        parts.append(args[at : at + count])
        at += count
    syms, logits, rows, whole, kept = parts
    placed = [bodies.Placed(p, v) for p, v in ((uses.rows, rows), (uses.whole, whole), (uses.syms, syms))]
    values = bodies.load(program.tile, "tile")(n, start, columns, logits, *placed)
    statistics: list[Tensor] = []
    wide: list[Tensor] = []
    at = 0
    for result, value in zip(program.results, values, strict=True):
        kind = result.split("/")[0]
        if kind == "wide":
            wide.append(torch.ops.aten.expand.default(value, [n, columns]))
            continue
        old = kept[at : at + online.STATISTICS[kind]]
        at += len(old)
        value = value if kind in ("pick", "hit") else torch.ops.aten.expand.default(value, [n, columns])
        statistics += online.merge(kind, old, online.of_tile(kind, value.to(old[0].dtype)))
    return [*statistics, *wide]


class _Steps:
    """The compiled variants of one step."""

    def __init__(self) -> None:
        self._variants: list[codegen.Compiled] = []
        self._failed = False

    def get(
        self, flat: Any, values: tuple[int, ...], uses: bodies.Uses, projections: int, tensors: list[Tensor]
    ) -> codegen.Compiled | None:
        """One that holds for the sizes ``values`` (rows, start, syms); None when compilation failed."""
        tested = (max(values[0], 2), *values[1:])
        found = next((v for v in self._variants if v.holds(tested)), None)
        if found is not None or self._failed or codegen.capturing():
            return found
        with codegen.compile_lock():
            names = ["n", "start", *(f"s{i}" for i in uses.syms)]
            by_row = projections + len(uses.rows)
            whole = range(by_row, by_row + len(uses.whole))
            specs = [
                codegen.TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device)
                if i in whole
                else codegen.TensorSpec((None, t.shape[1]), (t.shape[1], 1), t.dtype, t.device)
                for i, t in enumerate(tensors)
            ]
            for sizes in ((*HINTS, *values[2:]), tested):
                try:
                    compiled = codegen.compile_body(flat, list(zip(names, sizes, strict=True)), specs)
                except Exception as error:
                    bodies.log.warning(
                        "a tile step runs uncompiled, which is slower: %s: %s", type(error).__name__, str(error)[:2000]
                    )
                    break
                if compiled.holds(tested) and len(self._variants) < MAX_VARIANTS:
                    self._variants.append(compiled)
                    return compiled
            self._failed = True
            return None


_STEPS: dict[Any, _Steps] = {}
