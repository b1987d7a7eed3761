"""A step whose schedule is decided by what its outputs are used for.

A loss often returns metrics beside its value, and autograd lets the caller differentiate each that is not detached.
Hardly any caller does: then the gradients that the forward made in one pass, times the loss's tangent, are all there
is.  A caller that does needs the backward of two passes.  The graph has both.  The backward takes the first where the
tangents of all other outputs are zero (autograd hands in zeros for what nobody differentiated), and runs the second
otherwise.

A caller that differentiates two outputs does so in each step, so the forward goes by the last backward: where that one
could not use what the forward had made, the next forward makes no gradients.  It says so in a flag that travels with
them to the backward; whatever it did, the backward is right.

Reading the tangents waits for the device once a backward, as long as they are zero.  Where that is not possible (a CUDA
graph is being recorded) it is two passes throughout.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_grpo import runtime
from inductor_grpo._compat import codegen
from inductor_grpo.host import Arrival
from inductor_grpo.program import Program, Sink


class _Watch:
    """What the backwards of one step were asked for."""

    def __init__(self) -> None:
        self.differentiated = False
        """Other outputs than the loss were, the last time that is known of."""
        self._pending: Arrival | None = None

    def update(self) -> None:
        """Takes over an answer that has arrived; never waits."""
        if self._pending is not None and self._pending.is_there():
            self.differentiated, self._pending = any(self._pending.read()[1:]), None

    def alone(self, flag: Tensor, others: Sequence[Tensor]) -> bool:
        """Whether the gradients are there, and the loss alone was differentiated.

        Waits for the answer where it may be yes."""
        questions = [flag.eq(0).any(), *(other.ne(0).any().to(flag.device) for other in others)]
        answers = Arrival(torch.stack(questions))
        if self.differentiated:
            self._pending = answers
            return False
        missing, *asked = answers.read()
        self.differentiated = any(asked)
        return not missing and not self.differentiated


_watches: dict[str, _Watch] = collections.defaultdict(_Watch)
"""By the key of a step's programs."""


def forward(
    rows: Sequence[Tensor], whole: Sequence[Tensor], n: int, syms: Sequence[int], text: str, chunk_bytes: int, mode: str
) -> list[Tensor]:
    """Runs a program with a ``key``: its results, and int8 ``[1]``: whether its gradients are among them (1), or what
    stands in their place was never written (0)."""
    step = _Step.of(text)
    watch = _watches[step.key]
    watch.update()
    everything = not (codegen.capturing() or watch.differentiated)
    places = range(len(step.sinks)) if everything else step.values
    program = step.whole if everything else step.lean
    found = dict(zip(places, runtime.run(rows, whole, n, syms, program, chunk_bytes, mode) if places else ()))
    device = next(t.device for t in (*rows, *whole))
    for place, sink in enumerate(step.sinks):
        if place not in found:
            dims = runtime.shape(sink, rows, whole, n, syms)
            found[place] = torch.empty(dims, dtype=runtime.dtype(sink.dtype), device=device)
    flag = torch.full((1,), int(everything), dtype=torch.int8, device=device)
    return [*(found[place] for place in range(len(step.sinks))), flag]


def backward(
    ready: Sequence[Tensor],
    flag: Tensor,
    factor: Tensor,
    others: Sequence[Tensor],
    key: str,
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    n: int,
    syms: Sequence[int],
    text: str,
    chunk_bytes: int,
    mode: str,
) -> list[Tensor]:
    """``ready`` times the tangent ``factor`` where they were made and ``others`` are all zero, and what the program
    ``text`` gives elsewhere."""
    if not codegen.capturing() and _watches[key].alone(flag, others):
        with torch.no_grad():
            return [torch.mul(gradient, factor).contiguous() for gradient in ready]
    return runtime.run(rows, whole, n, syms, text, chunk_bytes, mode)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A program with a key, taken apart: its text with everything and that of the ``values``, sinks without
    gradients."""

    program: Program
    values: tuple[int, ...]
    whole: str
    lean: str

    @property
    def key(self) -> str:
        """Common to the programs of forward and backward."""
        return self.program.key

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """What the program gives."""
        return self.program.sinks

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> _Step:
        """The step of a program's text."""
        program = Program.from_text(text)
        values = tuple(i for i in range(len(program.sinks)) if i not in program.spare)
        plain = dataclasses.replace(program, key="", spare=())
        lean = dataclasses.replace(plain, sinks=tuple(program.sinks[i] for i in values))
        return _Step(program, values, plain.to_text(), lean.to_text())
