"""Scratch memory and tickets of segment kernels, kept for each device and stream."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from inductor_grpo.seam.kernels import TICKET_WORDS

_CAPTURED = 4096  # captured launches with a ticket of their own, a device: 128 KiB
_ROWS = 4  # pieces of scratch memory that a stream uses in turn
_HEAD = 16  # words before the scratch memory of a row, of which the first are the ticket
_lock = threading.Lock()
_by_device: dict[int, Scratch] = {}


class Scratch:
    """A device's scratch memory and tickets: words at zero in which kernels count blocks, and which they leave at zero.

    Kernels of one stream run one after the other, so they share memory.  A stream has a few rows, used in turn: if its
    handle is given anew while its last kernels still run, they do not meet.  A captured kernel has a ticket of its own
    for good, since graphs are replayed on any stream beside others, though none beside itself; its scratch memory is
    the graph's.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.captured = _kept(device, _CAPTURED * TICKET_WORDS)
        self.used = 0
        self.streams: dict[int, tuple[int, list[int]]] = {}
        self.memory: list[Tensor] = []
        self.turn = 0

    def take(self, stream: int, slots: int) -> tuple[int, int, Tensor | None]:
        """Pointers to ``slots`` eight-byte words and to a ticket, and what must live until the launch."""
        if torch.cuda.is_current_stream_capturing():
            return self._capture(slots)
        found = self.streams.get(stream)
        if found is None or found[0] < slots:
            found = self._grow(stream, slots)
        self.turn = (self.turn + 1) % _ROWS
        row = found[1][self.turn]
        return row + 8 * _HEAD, row, None

    def _grow(self, stream: int, slots: int) -> tuple[int, list[int]]:
        # What it replaces may still be in use and is not freed; sizes double, so that all together stay below twice.
        slots = max(1 << slots.bit_length(), 2048)
        memory = _kept(self.device, _ROWS * (slots + _HEAD))
        with _lock:
            self.memory.append(memory)
            rows = [memory.data_ptr() + 8 * k * (slots + _HEAD) for k in range(_ROWS)]
            self.streams[stream] = found = (slots, rows)
        return found

    def _capture(self, slots: int) -> tuple[int, int, Tensor]:
        with _lock:
            mine, self.used = self.used, self.used + 1
        if mine >= _CAPTURED:
            return _in_graph(self.device, slots)
        memory = torch.empty(slots, dtype=torch.int64, device=torch.device("cuda", self.device))
        return memory.data_ptr(), self.captured.data_ptr() + 8 * TICKET_WORDS * mine, memory


def take(device: int, stream: int, slots: int) -> tuple[int, int, Tensor | None]:
    """As :meth:`Scratch.take`, for the current device; in a capture before a device has any, the graph's own."""
    found = _by_device.get(device)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return _in_graph(device, slots)
        made = Scratch(device)
        found = _by_device.setdefault(device, made)
    return found.take(stream, slots)


def _in_graph(device: int, slots: int) -> tuple[int, int, Tensor]:
    """Scratch memory and a ticket that the graph itself puts to zero, with a kernel of its own."""
    memory = torch.zeros(slots + _HEAD, dtype=torch.int64, device=torch.device("cuda", device))
    return memory.data_ptr() + 8 * _HEAD, memory.data_ptr(), memory


def _kept(device: int, words: int) -> Tensor:
    """Zeros that are kept for good, there before this returns, whatever stream reads them.

    They come from a thread and a stream of their own: the caller's may be allocating from the pool of a CUDA graph, as
    it is while ``torch.compile`` warms up for one, and what is in the pool belongs to the graph.
    """
    made: list[Tensor] = []

    def make() -> None:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                made.append(torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", device)))
            stream.synchronize()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError("no scratch memory could be allocated")
    return made[0]
