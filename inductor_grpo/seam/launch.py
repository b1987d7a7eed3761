"""Launching segment programs: compiled kernels by program and device, tickets by stream, one launch a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_grpo._compat.allocation import empty_cuda
from inductor_grpo.seam import expressions, kernel_scratch, kernels
from inductor_grpo.seam.program import SegmentProgram
from inductor_grpo.seam.reference import reference


def supported(target: str) -> bool:
    """Whether the kernels know the operator, given as "aten.mul.Tensor"."""
    return expressions.supported(target)


def problem(program: SegmentProgram) -> str | None:
    """Why ``program`` has no kernel, or None."""
    variant = kernels.Variant(torch.int64, (False,) * len(program.scalars), tile_of(1 << 20))
    try:
        kernels.source(program, variant)
    except expressions.Unsupported as error:
        return str(error)
    return None


@functools.cache
def available() -> bool:
    """Whether kernels can run in this process: Triton, and CUDA or Triton's interpreter."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return interpreted() or (torch.version.cuda is not None and torch.cuda.is_available())


@functools.cache
def interpreted() -> bool:
    """Whether this process runs Triton's interpreter, on tensors of the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


# Tokens up to which a tile is used, and the tile: what was fastest on an H200.
_TILES = (
    (512, kernels.Tile(512, 16, 32, 64)),
    (8192, kernels.Tile(256, 8, 32, 64)),
    (65536, kernels.Tile(256, 8, 256, 64)),
    (262144, kernels.Tile(512, 8, 256, 64)),
    (2**31, kernels.Tile(1024, 8, 256, 64)),
)


def tile_of(tokens: int) -> kernels.Tile:
    """How ``tokens`` are cut into blocks."""
    for most, tile in _TILES:
        if tokens <= most:
            return tile
    return _TILES[-1][1]


def run(
    program_text: str,
    tokens: Sequence[Tensor],
    ids: Tensor,
    segments: Sequence[Tensor],
    scalars: Sequence[Tensor],
    ints: Sequence[int],
    count: int,
) -> list[Tensor]:
    """Runs a segment program with one kernel, on the current stream of the ids' device and without waiting for it.

    ``tokens`` ``[N]`` and ``segments`` ``[S]`` have the dtypes that the program names; ``ids`` ``[N]`` is int32 or
    int64; ``scalars`` are 0-dim, there or on the CPU; S is ``count``.  Returns the sums ``[S]`` in
    ``accumulator(dtype)`` and then the program's 0-dim results.  For sorted ids they repeat bit for bit; for unsorted
    ids the sums are added by atomics in no fixed order.  An id outside of ``[0, S)`` (``[-S, S)`` if the program wraps)
    trips an assertion on the device, as it does in eager.  Raises ``Unsupported`` for programs without a kernel.
    """
    device = ids.device
    host = tuple([s.device.type == "cpu" and device.type != "cpu" for s in scalars])
    launch = _launch(program_text, ids.dtype, host, device)
    return launch(tokens, ids, segments, scalars, ints, count)


@functools.lru_cache(maxsize=4096)
def _launch(text: str, ids: torch.dtype, host: tuple[bool, ...], device: torch.device) -> _Launch:
    return _Launch(text, ids, host, device)


class _Launch:
    """One program on one device: its kernels by tile, compiled at their first launch."""

    def __init__(self, text: str, ids: torch.dtype, host: tuple[bool, ...], device: torch.device) -> None:
        if ids not in (torch.int32, torch.int64):
            raise expressions.Unsupported(f"ids of {ids}")
        program = SegmentProgram.from_text(text)
        self.text, self.program, self.ids, self.host, self.device = text, program, ids, host, device
        named = [[getattr(torch, d) for d in x] for x in (program.tokens, program.segments, program.scalars)]
        self.dtypes = [*named[0], ids, *named[1], *named[2]]
        scalars = range(len(self.dtypes) - len(host), len(self.dtypes))
        self.on_host = [k for k, at_host in zip(scalars, host, strict=True) if at_host]
        outputs = program.output_dtypes()
        self.sums, self.results = outputs[: len(program.sums)], outputs[len(program.sums) :]
        self.slots = kernels.work_slots(program)
        self.kernels: dict[tuple[kernels.Tile, bool], _Kernel] = {}
        self.ints = [int(x[2:]) for x in program.ints]
        self.flat = len(program.tokens) + 1

    def __call__(
        self,
        tokens: Sequence[Tensor],
        ids: Tensor,
        segments: Sequence[Tensor],
        scalars: Sequence[Tensor],
        ints: Sequence[int],
        count: int,
    ) -> list[Tensor]:
        number = ids.numel()
        if number == 0:
            return reference(self.text, tokens, ids, segments, scalars, ints, count)
        if number >= 2**31 or count >= 2**31:
            raise ValueError("more tokens or segments than a 32-bit integer counts")
        inputs = [*tokens, ids, *segments, *scalars]
        if [x.dtype for x in inputs] != self.dtypes:
            raise TypeError("the inputs have other dtypes than the program names")
        inputs = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        if self.device.type != "cuda":
            return self._interpret(inputs, ints, count)
        if self.device.index == torch.cuda.current_device():
            return self._launch(inputs, ints, count)
        with torch.cuda.device(self.device):
            return self._launch(inputs, ints, count)

    def _launch(self, inputs: list[Tensor], ints: Sequence[int], count: int) -> list[Tensor]:
        number = inputs[self.flat - 1].numel()
        tile = tile_of(number)
        blocks = -(-number // tile.tokens)
        outputs = [empty_cuda((count,), d) for d in self.sums] + [empty_cuda((), d) for d in self.results]
        pointers: list[int | float] = [x.data_ptr() for x in inputs]
        for k in self.on_host:
            pointers[k] = inputs[k].item()
        pointers += [ints[k] for k in self.ints]
        pointers += [x.data_ptr() for x in outputs]
        stream = _stream_of()(self.device.index)
        scratch, ticket, _kept = 0, 0, None  # which one tile does without, though its kernel has the parameters
        if blocks > 1:
            scratch, ticket, _kept = kernel_scratch.take(self.device.index, stream, self.slots * (blocks + 15))
        kernel = self.kernels.get((tile, blocks == 1)) or self._kernel(tile, blocks == 1)
        kernel(blocks, (*pointers, scratch, ticket, number, count, blocks), stream)
        return outputs

    def _interpret(self, inputs: list[Tensor], ints: Sequence[int], count: int) -> list[Tensor]:
        number = inputs[self.flat - 1].numel()
        tile = tile_of(number)
        blocks = -(-number // tile.tokens)
        outputs = [torch.empty(count, dtype=d) for d in self.sums] + [torch.empty((), dtype=d) for d in self.results]
        scratch = torch.empty(self.slots * (blocks + 15), dtype=torch.int64)
        ticket = torch.zeros(kernels.TICKET_WORDS, dtype=torch.int64)
        kernel = self._kernel(tile, blocks == 1)
        arguments = (*inputs, *(ints[k] for k in self.ints), *outputs, scratch, ticket, number, count, blocks)
        kernel.function[(blocks, 1, 1)](*arguments)
        assert not ticket.any(), "a kernel left its ticket behind"
        return outputs

    def _kernel(self, tile: kernels.Tile, single: bool) -> _Kernel:
        key = (tile, single)
        if key not in self.kernels:
            variant = kernels.Variant(self.ids, self.host, tile, single, interpreted())
            self.kernels[key] = _Kernel(kernels.kernel(self.program, variant), tile.warps)
        return self.kernels[key]


class _Kernel:
    """A Triton function; after its first launch Triton's binder, which looks at each argument again, is passed by."""

    def __init__(self, function: Any, warps: int) -> None:
        self.function, self.warps = function, warps
        self.compiled: Any = None

    def __call__(self, blocks: int, arguments: tuple[Any, ...], stream: int) -> None:
        if self.compiled is not None:
            self.compiled[(blocks, 1, 1)](*arguments, stream=stream)
            return
        self.compiled = self.function[(blocks, 1, 1)](
            *arguments,
            num_warps=self.warps,
            num_stages=1,
            debug=True,  # device assertions, as in Inductor's kernels
            sanitize_overflow=False,
            enable_fp_fusion=False,  # products are rounded before they are added, as in eager
        )


@functools.cache
def _stream_of() -> Callable[[int], int]:
    """What gives the current stream of a device, as the handle that a launch takes."""
    from triton.runtime import driver

    return driver.active.get_current_stream
