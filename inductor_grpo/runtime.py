"""The loop over row chunks: what ``inductor_grpo::rows`` does when it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from inductor_grpo import body as bodies
from inductor_grpo import filter as filtering
from inductor_grpo import live_rows
from inductor_grpo._compat import codegen
from inductor_grpo.live_rows import LiveRows
from inductor_grpo.program import Program, Sink

MIB = 2**20
# Bytes of one [rows, V] buffer by default, from tools/bench_rows.py.  CUDA: forward programs gain nothing beyond the
# first number.  A weight gradient's sum is read and written once a chunk, so fewer chunks pay: the third number, or the
# second where generated code has fp32 temporaries of a chunk's size.
CPU_CHUNK_BYTES = 64 * MIB
CUDA_CHUNK_BYTES = (298 * MIB, 640 * MIB, 1280 * MIB)
# Logits below this are left alone by default: measured, their step takes no less memory than stock's (on an H200 at
# 250 MiB the two are equal, at 500 MiB a third is saved) and a little more time.
MIN_LOGITS_BYTES = {"cpu": 64 * MIB, "cuda": 384 * MIB}
# Columns of a vocabulary tile, and bytes of one [rows, tile] buffer of logits by default.  The width does not depend on
# the number of rows, so that two compiled steps (for a full tile and for the last) serve every number of rows.
TILE_COLUMNS = {"cpu": 2048, "cuda": 8192}
TILE_BYTES = {"cpu": 32 * MIB, "cuda": 256 * MIB}
# fp32 copies made per step of a gradient product where no kernel sums bf16 products in fp32.
UPCAST_BYTES = 32 * MIB


def default_chunk_bytes(device: str) -> int:
    """Bytes of one chunk of logits that a program with gradients may take by default."""
    return CPU_CHUNK_BYTES if device == "cpu" else CUDA_CHUNK_BYTES[1]


def one_chunk_bytes(device: str, sums: int) -> int:
    """Bytes of logits that are one chunk by default when chunks would need sums of so many bytes in fp32.

    One product needs no sum: the logits of all rows take no more memory then than a chunk's and the sum."""
    return CPU_CHUNK_BYTES if device == "cpu" else CUDA_CHUNK_BYTES[2] + sums


def min_logits_bytes(device: str) -> int:
    """Bytes of logits from which a region is rewritten by default."""
    return MIN_LOGITS_BYTES.get(device, MIN_LOGITS_BYTES["cuda"])


def tile_columns(device: str) -> int:
    """Columns of a vocabulary tile."""
    return TILE_COLUMNS.get(device, TILE_COLUMNS["cuda"])


def default_tile_bytes(device: str) -> int:
    """Bytes of one tile of logits by default."""
    return TILE_BYTES.get(device, TILE_BYTES["cuda"])


def run(
    rows: Sequence[Tensor], whole: Sequence[Tensor], n: int, syms: Sequence[int], text: str, chunk_bytes: int, mode: str
) -> list[Tensor]:
    """Runs the program ``text`` over all ``n`` rows; see :mod:`inductor_grpo.ops` for the arguments."""
    program = Program.from_text(text)
    device = next(t.device for t in (*rows, *whole))
    with torch.no_grad(), torch.autocast(device.type, enabled=False), codegen.plain_functions():
        return _Loop(program, text, rows, whole, n, syms, device, mode).run(chunk_bytes)


def number(size: int | str, syms: Sequence[int]) -> int:
    """A size of a program, with ``"s3"`` looked up in ``syms``."""
    return syms[int(size[1:])] if isinstance(size, str) else size


def columns(sink: Sink, syms: Sequence[int]) -> int:
    """Columns of a sink."""
    return number(sink.columns, syms)


def shape(sink: Sink, rows: Sequence[Tensor], whole: Sequence[Tensor], n: int, syms: Sequence[int]) -> tuple[int, int]:
    """Shape of a sink's result; also for symbolic sizes, which are never compared."""
    if sink.kind == "row":
        return n, columns(sink, syms)
    if sink.kind == "total":
        return 1, columns(sink, syms)
    if sink.kind == "contract":
        return n, whole[sink.input].shape[1]
    hidden = rows[sink.input].shape[1]
    return (columns(sink, syms), hidden) if sink.kind == "outer" else (hidden, columns(sink, syms))


def kept_shapes(
    program: Program, rows: Sequence[Tensor], whole: Sequence[Tensor], syms: Sequence[int]
) -> list[tuple[tuple[int, int], torch.dtype]]:
    """Shape and dtype of the logits that a program keeps."""
    kept = [program.projections[place] for place in program.keeps]
    count = number(program.kept_rows, syms)
    return [((count, whole[p.weight].shape[1]), rows[p.hidden].dtype) for p in kept]


@functools.cache
def dtype(name: str) -> torch.dtype:
    """The dtype called ``name``, such as ``"bfloat16"``."""
    return getattr(torch, name)


def chunk_rows(n: int, row_bytes: int, budget: int, group: int = 1) -> int:
    """Rows of a chunk: at most ``budget`` bytes (but one group of rows at least), all chunks near the same size.

    Large chunks are multiples of 256 rows (full matmul tiles), small ones of 16 (aligned slices of row operands).
    """
    most = max(1, budget // max(1, row_bytes))
    if most >= n:
        return max(1, n)
    if group > 1:
        groups, most = n // group, max(1, most // group)
        return group * -(-groups // -(-groups // most))
    step = 512 if most >= 2048 else 256 if most >= 512 else 16 if most >= 32 else 1
    most -= most % step
    even = -(-n // -(-n // most))
    return -(-even // step) * step


@dataclasses.dataclass
class Sum:
    """Running sum of an outer, outer_t or total sink."""

    tensor: Tensor
    empty: bool = True


class _Buffers(dict[int, Tensor]):
    """Memory for the logits of a chunk by projection, allocated when it is needed."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        super().__init__()
        self._allocate = allocate

    def __missing__(self, place: int) -> Tensor:
        self[place] = self._allocate(place)
        return self[place]


class _Loop:
    def __init__(
        self,
        program: Program,
        text: str,
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        n: int,
        syms: Sequence[int],
        device: torch.device,
        mode: str,
    ):
        self.program, self.text, self.device, self.mode = program, text, device, mode
        self.rows, self.whole, self.n, self.syms = rows, whole, n, tuple(syms)
        self.group = number(self.program.group, self.syms)
        hidden = [self.whole[s.input].shape[1] for s in self.program.sinks if s.kind == "contract"]
        hidden += [self.rows[s.input].shape[1] for s in self.program.sinks if s.kind in ("outer", "outer_t")]
        self.kept_rows = number(self.program.kept_rows, self.syms)
        self.kept = [self._empty(*spec) for spec in kept_shapes(self.program, rows, whole, self.syms)]
        self.live = LiveRows(text, device, n, max(hidden, default=0))
        self.proven: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        self._weight_sums: dict[int, Tensor] = {}
        self.uses = bodies.Uses.of(program.body, len(rows), len(whole), len(syms))
        self.logits = [(whole[p.weight].shape[1], rows[p.hidden].dtype) for p in program.projections]

    def run(self, chunk_bytes: int) -> list[Tensor]:
        n, sinks = self.n, self.program.sinks
        dims = [shape(sink, self.rows, self.whole, n, self.syms) for sink in sinks]
        outputs: list[Tensor | None] = [
            self._empty(d, dtype(sink.dtype)) if sink.kind in ("row", "contract") else None
            for d, sink in zip(dims, sinks)
        ]
        sums = {
            i: Sum(self._empty(dims[i], self._sum_dtype(sink, False)).zero_())
            for i, sink in enumerate(sinks)
            if sink.kind == "total"
        }
        widths = {s.value: self._width(s) for s in sinks if s.kind in bodies.MATMUL_KINDS}
        body = self._body(widths, outputs, sums)
        size = chunk_rows(n, self._row_bytes(), chunk_bytes or self._default_bytes(body), self.group)
        if self.kept_rows >= n and (self.program.keeps or self.program.takes_over):
            size = max(1, n)  # their memory is there anyway
        spans = self._spans(size) if n else []
        for i, sink in enumerate(sinks):
            if sink.kind in ("outer", "outer_t"):
                fresh = self._empty(dims[i], self._sum_dtype(sink, len(spans) <= 1))
                sums[i] = Sum(fresh if n else fresh.zero_())
        if n:
            self._chunks(body, widths, spans, outputs, sums)
            self.live.finish()
        for position, total in sums.items():
            result = total.tensor.to(dtype(sinks[position].dtype))
            outputs[position] = total.tensor = result  # frees the accumulator before the next cast
        return [*cast("list[Tensor]", outputs), *self.kept]

    def _chunks(
        self,
        body: bodies.Body,
        widths: dict[int, int],
        spans: list[tuple[int, int]],
        outputs: list[Tensor | None],
        sums: dict[int, Sum],
    ) -> None:
        sinks = self.program.sinks
        longest = max(stop - start for start, stop in spans)
        buffers = _Buffers(lambda place: self._empty((longest, self.logits[place][0]), self.logits[place][1]))
        # Summed from the buffer that holds the value: inside the body the sum would need a copy of it.
        late = {i for i, s in enumerate(sinks) if s.kind == "total" and i not in body.plan.targets}
        used_whole = [self.whole[i] for i in self.uses.whole]
        used_syms = [self.syms[i] for i in self.uses.syms]
        self.proven = live_rows.proven(self.program, self.rows, self.whole, body.checked(used_syms))
        skips = self.live.zeroes and all(self._is_proven(s) for s in sinks if s.kind in bodies.MATMUL_KINDS)
        operands: list[bodies.Operand] = []
        for start, stop in spans:
            count = stop - start
            logits = self._project(start, stop, buffers)
            targets = []
            for position in body.plan.targets:
                out_ = outputs[position]
                targets.append(sums[position].tensor if out_ is None else out_[start:stop])
            used_rows = [self.rows[i][start:stop].contiguous() for i in self.uses.rows]
            operands = body.run(count, logits, used_rows, used_whole, used_syms, targets, widths, skips)
            in_place = dict(body.plan.in_place)
            for place in body.plan.operands:
                mine = [i for i, s in enumerate(sinks) if s.value == place and (s.operand is not None or i in late)]
                self._multiply(
                    operands.pop(0), place in in_place, [(i, sinks[i]) for i in mine], start, stop, outputs, sums
                )
            del operands, used_rows, targets

    def _spans(self, size: int) -> list[tuple[int, int]]:
        """The chunks.  None has both rows whose logits are kept for later and others; where they were kept before, only
        the one chunk of all rows has."""
        kept = 0 if self.program.reuses and size >= self.n else self.kept_rows
        starts = sorted({*range(0, kept, size), *range(kept, self.n, size)})
        return list(zip(starts, [*starts[1:], self.n]))

    def _project(self, start: int, stop: int, buffers: _Buffers) -> list[Tensor]:
        """The logits of rows ``start`` to ``stop``, one tensor a projection; kept ones are written where they stay, and
        those that are taken over are where they were kept."""
        known = dict(self.program.reuses)
        stay = dict(zip(self.program.keeps, self.kept))
        if self.program.takes_over:
            stay.update({place: self.whole[kept] for place, kept in known.items()})
        found = []
        for place, projection in enumerate(self.program.projections):
            stays = place in stay and stop <= self.kept_rows
            out = stay[place][start:stop] if stays else buffers[place][: stop - start]
            found.append(out)
            first = start
            if place in known and start < self.kept_rows:
                first = min(stop, self.kept_rows)
                if not stays:
                    out[: first - start].copy_(self.whole[known[place]][start:first])
            if first == stop:
                continue
            hidden, weight = self.rows[projection.hidden][first:stop], self.whole[projection.weight]
            if projection.bias is None:
                torch.mm(hidden, weight, out=out[first - start :])
            else:
                torch.addmm(self.whole[projection.bias], hidden, weight, out=out[first - start :])
        return found

    def _multiply(
        self,
        operand: bodies.Operand,
        in_place: bool,
        sinks: Sequence[tuple[int, Sink]],
        start: int,
        stop: int,
        outputs: Sequence[Tensor | None],
        sums: dict[int, Sum],
    ) -> None:
        """Everything that one gradient ``[stop - start, V]`` of a chunk is multiplied with or summed to.

        ``in_place``: it lies where logits did."""
        value, live = operand
        others = {i: self.rows[s.input][start:stop] for i, s in sinks if s.kind in ("outer", "outer_t")}
        matmuls = [(i, s) for i, s in sinks if s.kind in bodies.MATMUL_KINDS]
        unknown = [(i, s) for i, s in matmuls if live is None or not self._is_proven(s)]
        weights = [self.whole[s.input] for _, s in unknown if s.kind == "contract"]
        operands = [others[i] for i, _ in unknown if i in others]
        owned = in_place or live is not None  # what a row kernel wrote is in memory of its own
        value, packing = self.live.pack(value, owned, weights, operands, live)
        if packing is not None:
            others = {i: packing.rows(other) for i, other in others.items()}
        for position in (i for i, s in sinks if s.kind == "total"):
            sums[position].tensor.add_(value.sum(0, keepdim=True, dtype=sums[position].tensor.dtype))
        parts = filtering.live_parts(value, self.program.filter_eps) if matmuls else None
        if parts is not None:
            filtering.pack(parts, value, owned)
        for position, sink in matmuls:
            if sink.kind == "contract":
                result = cast(Tensor, outputs[position])[start:stop]
                target = result if packing is None else packing.room(result)
                if parts is None:
                    self._contract(value, self.whole[sink.input], target)
                else:
                    filtering.contract(parts, value, self.whole[sink.input], target, self._weight_sums)
                if packing is not None:
                    packing.spread(target, result)
            elif parts is not None:
                filtering.outer(parts, sums[position], value, others[position], sink.kind == "outer_t")
            else:
                other = others[position]
                left, right = (value.t(), other) if sink.kind == "outer" else (other.t(), value)
                add_product(sums[position], left, right)

    def _is_proven(self, sink: Sink) -> bool:
        """Whether a product's other operand is finite as far as rows that are not live reach it."""
        return sink.input in self.proven[sink.kind == "contract"]

    def _empty(self, dims: tuple[int, int], kind: torch.dtype) -> Tensor:
        return torch.empty(dims, dtype=kind, device=self.device)

    def _row_bytes(self) -> int:
        """Bytes of one row of the widest projection, or of the widest row operand where there is no projection."""
        widest = [width * kind.itemsize for width, kind in self.logits]
        widest = widest or [t.shape[1] * t.element_size() for t in self.rows]
        return max(1, max(widest, default=1))

    def _default_bytes(self, body: bodies.Body) -> int:
        """Bytes of one chunk of logits; those of all rows, where they are one chunk."""
        if self.device.type == "cpu":
            return CPU_CHUNK_BYTES
        plain, summed, most = CUDA_CHUNK_BYTES
        outer = [sink for sink in self.program.sinks if sink.kind in ("outer", "outer_t")]
        if not outer:
            return plain
        if self._needs_temporaries(body):
            return summed
        wide = 0
        for sink in outer:
            kind = self._sum_dtype(sink, single=False)
            if kind != dtype(sink.dtype):
                height, width = shape(sink, self.rows, self.whole, self.n, self.syms)
                wide += height * width * kind.itemsize
        everything = self.n * sum(width * kind.itemsize for width, kind in self.logits)
        return self.n * self._row_bytes() if everything <= one_chunk_bytes(self.device.type, wide) else most

    def _needs_temporaries(self, body: bodies.Body) -> bool:
        """The body sums over the vocabulary, beside the softmax, before it can write a gradient: generated code takes
        fp32 buffers of a chunk's size for that, a row kernel none."""
        several = bodies.wide_sums(self.program.body) > 1
        return several and not body.runs_by_row([self.syms[i] for i in self.uses.syms])

    def _sum_dtype(self, sink: Sink, single: bool) -> torch.dtype:
        result = dtype(sink.dtype)
        if single and sink.kind != "total":
            return result  # one product, which the matmul itself sums in fp32
        return torch.promote_types(dtype(sink.accumulate), result)

    def _width(self, sink: Sink) -> int:
        return self.whole[sink.input].shape[0] if sink.kind == "contract" else columns(sink, self.syms)

    @staticmethod
    def _contract(value: Tensor, weight: Tensor, out: Tensor) -> None:
        if out.dtype == value.dtype:
            torch.mm(value, weight, out=out)
        else:
            out.copy_(torch.mm(value, weight))

    def _body(self, widths: dict[int, int], outputs: list[Tensor | None], sums: dict[int, Sum]) -> bodies.Body:
        program = self.program
        rows = [(self.rows[i].shape[1], self.rows[i].dtype) for i in self.uses.rows]
        whole = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in (self.whole[i] for i in self.uses.whole)]
        targets = []
        for position in self._targets(widths):
            out = outputs[position]
            tensor = sums[position].tensor if out is None else out
            sink = program.sinks[position]
            targets.append((None if sink.kind == "row" else 1, tensor.shape[1], tensor.dtype))
        key = (
            self.text,
            self.mode,
            self.device,
            tuple(self.logits),
            tuple(rows),
            tuple(whole),
            tuple(targets),
            tuple(widths.items()),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )

        def make() -> bodies.Body:
            spec = codegen.TensorSpec
            specs = [spec((None, width), (width, 1), kind, self.device) for width, kind in (*self.logits, *rows)]
            specs += [spec(dims, stride, kind, device) for dims, stride, kind, device in whole]
            specs += [spec((lead, width), (width, 1), kind, self.device) for lead, width, kind in targets]
            base, _, extra = self.mode.partition("+")
            plan = self._plan(widths)
            return bodies.Body(program, plan, self.uses, specs, base == "inductor", extra == "row_kernel")

        return bodies.get(key, make)

    def _plan(self, widths: dict[int, int]) -> bodies.Plan:
        """Chooses which operand takes which logits buffer: same width, and the dtype its matmul reads; none takes
        logits that are kept."""
        program = self.program
        free = {place: logits for place, logits in enumerate(self.logits) if place not in program.keeps}
        in_place = []
        for value in widths:
            sink = next(s for s in program.sinks if s.value == value and s.kind in bodies.MATMUL_KINDS)
            other = self.whole if sink.kind == "contract" else self.rows
            kind = other[sink.input].dtype
            match = next((i for i, logits in free.items() if logits == (widths[value], kind)), None)
            if match is not None:
                del free[match]
                in_place.append((value, match))
        return bodies.Plan(self._targets(widths), tuple(widths), tuple(in_place))

    def _targets(self, operands: dict[int, int]) -> tuple[int, ...]:
        sinks = enumerate(self.program.sinks)
        return tuple(i for i, s in sinks if s.kind == "row" or (s.kind == "total" and s.value not in operands))


def add_product(total: Sum, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` where nothing is rounded to a lower precision than the sum's before it is added."""
    out = total.tensor
    first, total.empty = total.empty, False
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out) if first else out.addmm_(left, right)
    elif codegen.has_mixed_addmm(out.device.type) and out.dtype == torch.float32:
        if first:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        _add_upcast(out, left, right, first)


def _add_upcast(out: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """The product in the sum's dtype, a block of the wider operand at a time so that the copies stay small."""
    if left.shape[0] < right.shape[1]:
        out, left, right = out.t(), right.t(), left.t()
    whole = right.to(out.dtype)
    block = max(1, UPCAST_BYTES // max(1, left.shape[1] * out.element_size()))
    for start in range(0, left.shape[0], block):
        part = out[start : start + block]
        # A transposed view is upcast as it lies in memory: the copy keeps its strides.
        part.addmm_(left[start : start + block].to(out.dtype), whole, beta=0 if first else 1)
