"""The chunk program: what one region does to one run of rows, as data.

A region becomes one call of ``inductor_grpo::rows`` and carries its program as *text*, not as a registry id or a
closure: FX and AOTAutograd caches then work in a process that never ran the pass.

A program runs in three steps for each run of ``n`` rows:

1. *projections*: ``logits_i = rows[hidden] @ whole[weight] (+ whole[bias])``, one ``[n, V]`` buffer each;
2. *body*: row-local maths in aten, ``body(n, logits, rows, whole, syms) -> tuple``; no matmul in it;
3. *sinks*: what is kept of the body's values.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, Literal

_HEX = "hex:"


def in_hex(text: str) -> str:
    """A program's text without quotes and backslashes, which :func:`read` takes as well; other strings as they are."""
    return _HEX + text.encode().hex() if text.startswith("{") else text


def read(text: str) -> Any:
    """The data of a program's text."""
    plain = bytes.fromhex(text.removeprefix(_HEX)).decode() if text.startswith(_HEX) else text
    return json.loads(plain)


SinkKind = Literal["row", "contract", "outer", "outer_t", "total"]


@dataclasses.dataclass(frozen=True)
class Projection:
    """``rows[hidden] @ whole[weight]`` with hidden ``[n, H]``, weight ``[H, V]`` (any strides) and bias ``[V]`` or
    None."""

    hidden: int
    weight: int
    bias: int | None = None


@dataclasses.dataclass(frozen=True)
class Sink:
    """One output of the region.

    kind       result, with ``v = body(...)[value]`` for each run of rows
    row        ``[N, c]``: v ``[n, c]`` written to its rows
    contract   ``[N, H]``: ``v @ whole[operand]``, operand ``[V, H]``; the gradient of hidden
    outer      ``[V, H]``: sum over runs of ``v.T @ rows[operand]``; the gradient of a weight stored ``[V, H]``
    outer_t    ``[H, V]``: sum over runs of ``rows[operand].T @ v``
    total      ``[1, c]``: sum over all rows of v; the gradient of a bias

    ``columns`` is c or V: a number, or ``"s3"`` for ``syms[3]``.  ``dtype`` is that of the result ("bfloat16");
    ``accumulate`` that of the running sum of outer, outer_t and total.
    """

    kind: SinkKind
    value: int
    operand: int | None
    columns: int | str
    dtype: str
    accumulate: str = "float32"

    @property
    def input(self) -> int:
        """``operand``, of a kind that has one."""
        assert self.operand is not None
        return self.operand


@dataclasses.dataclass(frozen=True)
class Program:
    """A chunk program; ``body`` is the source of one Python function over ``torch.ops``.

    Runs of rows are whole groups of ``group`` rows.  The logits of the first ``kept_rows`` rows are returned for each
    projection in ``keeps``, after the results of the sinks; ``reuses`` are pairs of a projection and the tensor in
    ``whole`` where another program has kept them; one that ``takes_over`` may write over them.  ``group`` and
    ``kept_rows`` are numbers, or ``"s3"`` for ``syms[3]``.  ``filter_eps``: see :mod:`inductor_grpo.filter`.  With a
    ``key`` the results of the sinks in ``spare``, gradients, are made when they are of use, see
    :mod:`inductor_grpo.by_use`."""

    projections: tuple[Projection, ...]
    body: str
    sinks: tuple[Sink, ...]
    group: int | str = 1
    kept_rows: int | str = 0
    keeps: tuple[int, ...] = ()
    reuses: tuple[tuple[int, int], ...] = ()
    takes_over: bool = False
    filter_eps: float = 0.0
    key: str = ""
    spare: tuple[int, ...] = ()

    def to_text(self) -> str:
        """The program as JSON; equal programs give equal text."""
        data = dataclasses.asdict(self)
        for key in ("takes_over", "filter_eps", "key", "spare"):
            if not data[key]:
                del data[key]
        return json.dumps(data, separators=(",", ":"), sort_keys=True)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def from_text(text: str) -> Program:
        """Reads what :meth:`to_text` wrote."""
        data = read(text)
        return Program(
            projections=tuple(Projection(**p) for p in data["projections"]),
            body=data["body"],
            sinks=tuple(Sink(**s) for s in data["sinks"]),
            group=data["group"],
            kept_rows=data["kept_rows"],
            keeps=tuple(data["keeps"]),
            reuses=tuple((place, whole) for place, whole in data["reuses"]),
            takes_over=data.get("takes_over", False),
            filter_eps=data.get("filter_eps", 0.0),
            key=data.get("key", ""),
            spare=tuple(data.get("spare", ())),
        )


@dataclasses.dataclass(frozen=True)
class TileProgram:
    """A program that runs over tiles of the vocabulary, ``logits = rows[hidden] @ whole[weight][:, start:stop]``.

    ``tile``    source of ``tile(n, start, columns, logits, rows, whole, syms) -> tuple``: what one tile gives, see
                ``results``
    ``results`` for each of them its use and dtype, ``"softmax/float32"``: "softmax" and "softmax_weighted" keep online
                statistics (:mod:`inductor_grpo.online`), "sum", "max" and "min" reduce over the vocabulary, "pick" is
                an element that one tile has and "hit" whether this tile has it (it must be found once, or the label was
                out of range), "wide" is read by a sink
    ``finish``  source of ``finish(n, statistics, rows, whole, syms) -> tuple``: the row values; statistics are
                ``[n, 1]``, in the order of the results
    ``sinks``   row sinks read finish's values; contract, outer, outer_t and total sinks read the "wide" results,
                numbered among themselves
    ``sliced_rows``, ``sliced_whole``  inputs with a vocabulary dimension, of which a tile sees its own columns
    """

    projections: tuple[Projection, ...]
    tile: str
    results: tuple[str, ...]
    finish: str
    sinks: tuple[Sink, ...]
    sliced_rows: tuple[int, ...]
    sliced_whole: tuple[int, ...]

    def to_text(self) -> str:
        """The program as JSON; equal programs give equal text."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def from_text(text: str) -> TileProgram:
        """Reads what :meth:`to_text` wrote."""
        data = read(text)
        return TileProgram(
            projections=tuple(Projection(**p) for p in data["projections"]),
            tile=data["tile"],
            results=tuple(data["results"]),
            finish=data["finish"],
            sinks=tuple(Sink(**s) for s in data["sinks"]),
            sliced_rows=tuple(data["sliced_rows"]),
            sliced_whole=tuple(data["sliced_whole"]),
        )
