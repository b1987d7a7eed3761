"""The body of a chunk program as something to call: compiled once with a symbolic row count, or run in eager mode.

A *chunk step* is ``body`` plus what is done with its values that needs no matmul: row sinks are written to their slice
of the output, total sinks are added to their sum, and a value that a matmul will read is written over the logits it
came from when dtype and width allow, so that no second ``[n, V]`` tensor exists.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from inductor_grpo._compat import codegen
from inductor_grpo.program import Program
from inductor_grpo.row_kernel import launch as row_kernels
from inductor_grpo.row_kernel.chunk import ChunkKernel

log = logging.getLogger("inductor_grpo")

MATMUL_KINDS = ("contract", "outer", "outer_t")
# Compiled variants of one body: beyond this the sizes it sees defeat compilation, and eager is the better answer.
MAX_VARIANTS = 8
# The row count a body is tuned for: fixed, so that neither its code nor its cache entry depends on the first call.
HINT_ROWS = 1024
# An eager body makes about ten [n, V] temporaries, so it sees so many bytes of logits at a time.
EAGER_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}


@functools.lru_cache(maxsize=1024)
def load(source: str, name: str = "body") -> Callable[..., Any]:
    """The function ``name`` of a program's source text."""
    namespace: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": float("inf"),
        "nan": float("nan"),
        "operator": operator,
    }
    exec(compile(source, "<inductor_grpo body>", "exec"), namespace)
    return namespace[name]


@functools.lru_cache(maxsize=1024)
def wide_sums(source: str) -> int:
    """How many sums over the columns a body's text has; sums over the rows of a group are none."""
    wide = set(re.findall(r"(v\d+) = torch\.ops\.aten\.expand\.default\(v\d+, \[n, (?!1\])[^\]]+\]\)", source))
    return sum(name in wide for name in re.findall(r"torch\.ops\.aten\.sum\.dim_IntList\((v\d+),", source))


@dataclasses.dataclass(frozen=True)
class Uses:
    """Which arguments a body reads, as positions; known from its text so that unused ones are never passed."""

    rows: tuple[int, ...]
    whole: tuple[int, ...]
    syms: tuple[int, ...]

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(source: str, rows: int, whole: int, syms: int) -> Uses:
        """Reads ``name[3]`` out of the text; a name used in any other way counts as a use of all of them."""
        text = source.split("\n", 1)[1] if "\n" in source else source

        def find(name: str, count: int) -> tuple[int, ...]:
            indexed = {int(i) for i in re.findall(rf"\b{name}\[(\d+)\]", text)}
            bare = re.search(rf"(?<!\.)\b{name}\b(?!\[\d+\])", text)
            return tuple(range(count)) if bare else tuple(sorted(indexed))

        return Uses(find("rows", rows), find("whole", whole), find("syms", syms))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a chunk step does with the body's values; positions refer to ``Program.sinks``."""

    targets: tuple[int, ...]  # row sinks and those total sinks whose value no matmul reads, in order
    operands: tuple[int, ...]  # body values read by matmul sinks
    in_place: tuple[tuple[int, int], ...]  # (body value, projection whose buffer takes it)


class Placed:
    """Sparse stand-in for an argument list: position -> value."""

    def __init__(self, positions: Sequence[int], values: Sequence[Any]):
        self._values = dict(zip(positions, values, strict=True))

    def __getitem__(self, position: int) -> Any:
        return self._values[position]

    def __iter__(self) -> Any:
        return iter(self._values[i] for i in range(len(self._values)))

    def __len__(self) -> int:
        return len(self._values)


def _dense(value: Tensor, n: Any, columns: Any) -> Tensor:
    """``value`` broadcast to ``[n, columns]``."""
    return torch.ops.aten.expand.default(value, [n, columns])


def _is_view_of_another(value: Tensor, target: Tensor, logits: Sequence[Tensor]) -> bool:
    return any(codegen.shares_storage(value, buffer) and value is not target for buffer in logits)


def step(
    program: Program,
    plan: Plan,
    n: Any,
    logits: Sequence[Tensor],
    rows: Any,
    whole: Any,
    syms: Any,
    targets: Sequence[Tensor],
    widths: dict[int, Any],
) -> list[Tensor | None]:
    """Runs the body on one chunk and stores what needs no matmul.

    ``targets``: for a row sink its ``[n, c]`` slice, for a total sink its ``[1, c]`` running sum.
    ``widths``: the columns of each operand.
    Returns for each of ``plan.operands`` the dense ``[n, c]`` tensor, or None where it went over a logits buffer.
    """
    values = load(program.body)(n, logits, rows, whole, syms)
    # All reads come before all writes: a write may change the logits.
    stores: list[tuple[Tensor, Tensor]] = []
    for position, target in zip(plan.targets, targets, strict=True):
        value = values[program.sinks[position].value]
        if program.sinks[position].kind == "total":
            value = _dense(value, n, target.shape[1]).sum(0, keepdim=True, dtype=target.dtype)
            value = torch.ops.aten.add.Tensor(target, value)
        stores.append((target, value))
    placed = dict(plan.in_place)
    results: list[Tensor | None] = []
    for operand in plan.operands:
        if operand in placed:
            stores.append((logits[placed[operand]], values[operand]))
            results.append(None)
        else:
            dense = _dense(values[operand], n, widths[operand])
            # It may be a view of logits that a store below overwrites.
            results.append(dense.clone() if plan.in_place else dense)
    del values
    # A value may be (a view of) logits that an earlier store overwrites.
    stores = [(t, v.clone() if len(stores) > 1 and _is_view_of_another(v, t, logits) else v) for t, v in stores]
    for target, value in stores:
        if value is not target:
            torch.ops.aten.copy_.default(target, value)
    return results


class Operand(NamedTuple):
    """A value ``[n, c]`` that matmuls read; ``live``, int8 ``[n]``: 0 where a row of it is known to be zero, and the
    logits of that row that :meth:`Body.checked` names are finite.  None where nothing is known."""

    value: Tensor
    live: Tensor | None = None


class Body:
    """The chunk step of one program for one set of dtypes and widths."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        uses: Uses,
        specs: Sequence[codegen.TensorSpec],
        compiled: bool,
        row_kernel: bool = False,
    ):
        self.program = program
        self.plan = plan
        self.uses = uses
        self.specs = tuple(specs)
        self._eager = not compiled
        self._failed = False
        self._variants: list[codegen.Compiled] = []
        self._chosen: dict[tuple[int, ...], codegen.Compiled | None] = {}
        self._row_kernel: ChunkKernel | None = None
        self.no_row_kernel: str | None = None if row_kernel else "grpo.row_kernel is off"
        """Why the step does not run as a row kernel; None before the first run, or when it does."""

    def run(
        self,
        n: int,
        logits: Sequence[Tensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        syms: Sequence[int],
        targets: Sequence[Tensor],
        widths: dict[int, int],
        skips: bool = False,
    ) -> list[Operand]:
        """Runs one chunk, see :func:`step`; ``rows``, ``whole`` and ``syms`` hold only what the body uses.

        With ``skips`` the operands' memory may hold anything in rows that are known not to be live."""
        by_row = None if self.no_row_kernel else self._by_row(n, logits, rows, whole, syms, targets, skips)
        compiled = None if self._eager or by_row is not None else self._variant(n, syms, widths)
        live: Sequence[Tensor | None] = [None] * len(self.plan.operands)
        if by_row is not None:
            results, live = by_row
        elif compiled is None:
            results = self._run_eager(n, logits, rows, whole, syms, targets, widths)
        else:
            results = list(compiled([n, *syms, *logits, *rows, *whole, *targets]))
        placed = dict(self.plan.in_place)
        return [
            Operand(logits[placed[operand]] if result is None else result, known)
            for operand, result, known in zip(self.plan.operands, results, live, strict=True)
        ]

    def checked(self, syms: Sequence[int]) -> frozenset[int]:
        """The projections whose logits are looked at for :attr:`Operand.live`; ``syms`` are those that are used."""
        return self._row_kernel.kernel.checked if self.runs_by_row(syms) and self._row_kernel else frozenset()

    def _by_row(
        self,
        n: int,
        logits: Sequence[Tensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        syms: Sequence[int],
        targets: Sequence[Tensor],
        skips: bool,
    ) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
        """The step as one row kernel; None where there is none."""
        if not self.runs_by_row(syms) or (kernel := self._row_kernel) is None or not kernel.holds(n, syms):
            return None
        first = not kernel.ran
        try:
            return kernel.run(n, logits, rows, whole, syms, targets, skips)
        except Exception as error:
            # A kernel that does not compile has not run: the generated body takes over.
            if not first:
                raise
            self._do_without_row_kernel(error)
            return None

    def runs_by_row(self, syms: Sequence[int]) -> bool:
        """Whether the step is one row kernel; ``syms`` are those that the body uses."""
        if self.no_row_kernel is not None:
            return False
        if self._row_kernel is None:
            if codegen.capturing():
                return False  # as for a compiled variant: the next call looks again
            try:
                with codegen.compile_lock():
                    self._row_kernel = self._find_row_kernel(syms)
            except row_kernels.Unfit as reason:
                self.no_row_kernel = str(reason)
                log.info("a chunk body has no row kernel: %s", reason)
            except Exception as error:
                self._do_without_row_kernel(error)
        return self._row_kernel is not None

    def _do_without_row_kernel(self, error: Exception) -> None:
        """Raises ``error`` again where there is nothing but the interpreter that tests run."""
        if self.specs[0].device.type != "cuda":
            raise error
        self.no_row_kernel = f"{type(error).__name__}: {error}"
        log.warning("a row kernel does not compile, generated code is used: %s", self.no_row_kernel[:2000])

    def reset_row_kernel(self) -> None:
        """Looks for a row kernel again at the next run."""
        self._row_kernel = self.no_row_kernel = None

    def _find_row_kernel(self, syms: Sequence[int]) -> ChunkKernel:
        device = self.specs[0].device
        if not row_kernels.available(device):
            raise row_kernels.Unfit(f"row kernels need CUDA and Triton, and this is {device}")
        hint = self._group(syms) * max(1, HINT_ROWS // self._group(syms))
        return ChunkKernel(self.program, self.plan, self.uses, self.specs, syms, hint)

    def _run_eager(
        self,
        n: int,
        logits: Sequence[Tensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        syms: Sequence[int],
        targets: Sequence[Tensor],
        widths: dict[int, int],
    ) -> list[Tensor | None]:
        """The step without generated code, a few rows at a time so that its temporaries stay small."""
        wide = [*logits, *rows]
        row_bytes = max((t.shape[1] * t.element_size() for t in wide), default=1)
        kind = wide[0].device.type if wide else "cpu"
        size = max(1, EAGER_BYTES.get(kind, EAGER_BYTES["cuda"]) // max(1, row_bytes))
        group = self._group(syms)
        size = max(group, size - size % group)
        parts: list[list[Tensor | None]] = []
        per_row = [self.program.sinks[position].kind == "row" for position in self.plan.targets]
        for start in range(0, n, size):
            stop = min(start + size, n)
            parts.append(
                step(
                    self.program,
                    self.plan,
                    stop - start,
                    [t[start:stop] for t in logits],
                    Placed(self.uses.rows, [t[start:stop] for t in rows]),
                    Placed(self.uses.whole, whole),
                    Placed(self.uses.syms, syms),
                    [t[start:stop] if by_row else t for t, by_row in zip(targets, per_row, strict=True)],
                    widths,
                )
            )
        joined = zip(*parts, strict=True)
        return [None if some[0] is None else torch.cat(cast("tuple[Tensor, ...]", some)) for some in joined]

    @property
    def uncompiled(self) -> bool:
        """Whether compilation was tried and given up."""
        return self._failed

    def sources(self) -> list[str]:
        """Generated code of the row kernel and of each compiled variant."""
        kernels = [] if self._row_kernel is None else [self._row_kernel.kernel.source]
        return kernels + [codegen.source_of(v) for v in self._variants]

    def _variant(self, n: int, syms: Sequence[int], widths: dict[int, int]) -> codegen.Compiled | None:
        values = (n, *syms)
        if values in self._chosen:
            return self._chosen[values]
        if codegen.capturing():
            return None  # code cannot be loaded or tuned during capture; nothing is remembered, the next call compiles
        with codegen.compile_lock():
            if values in self._chosen:
                return self._chosen[values]
            # One row runs the code of two: the body is row-local, so what the tracer derives from n >= 2 (which stride
            # of a size-1 dimension counts) does not touch values.
            tested = (max(n, 2), *syms)
            found = next((v for v in self._variants if v.holds(tested)), None)
            if found is None and not self._eager:
                found = self._compile(tested, widths)
            if len(self._chosen) > 4096:
                self._chosen.clear()
            self._chosen[values] = found
            return found

    def _compile(self, values: tuple[int, ...], widths: dict[int, int]) -> codegen.Compiled | None:
        """A new variant whose guards hold for ``values`` (row count first); None after giving up."""
        n, *syms = values
        if len(self._variants) >= MAX_VARIANTS:
            self._give_up(f"{MAX_VARIANTS} variants of one body were compiled and none fits {n} rows")
            return None
        names = ["n", *(f"s{i}" for i in self.uses.syms)]
        group = self._group(syms)
        usual = group * max(1, HINT_ROWS // group)
        for rows in dict.fromkeys((usual, n)):  # the real row count only where a guard tells it from the usual one
            try:
                compiled = codegen.compile_body(
                    functools.partial(self._flat, dict(widths)),
                    list(zip(names, (rows, *syms), strict=True)),
                    self.specs,
                )
            except Exception as error:
                if self.plan.in_place:
                    # Code generation may do without the writes into the logits: one more buffer, but not eager.
                    log.info(
                        "a chunk body is compiled without writing into its logits: %s: %s", type(error).__name__, error
                    )
                    self.plan = dataclasses.replace(self.plan, in_place=())
                    self._variants.clear()
                    return self._compile(values, widths)
                self._give_up(f"{type(error).__name__}: {error}")
                return None
            self._variants.append(compiled)
            if compiled.holds(values):
                return compiled
        self._give_up(f"the compiled body excludes the size {n} it was compiled for")
        return None

    def _group(self, syms: Sequence[int]) -> int:
        """Rows of a group; ``syms`` are those that the body uses."""
        group = self.program.group
        return syms[self.uses.syms.index(int(group[1:]))] if isinstance(group, str) else group

    def _flat(self, widths: dict[int, int], n: Any, *args: Any) -> list[Tensor | None]:
        """The step over one flat argument list, as it is traced."""
        counts = (len(self.uses.syms), len(self.program.projections), len(self.uses.rows), len(self.uses.whole))
        parts: list[Sequence[Any]] = []
        start = 0
        for count in counts:
            parts.append(args[start : start + count])
            start += count
        syms, logits, rows, whole = parts
        return step(
            self.program,
            self.plan,
            n,
            logits,
            Placed(self.uses.rows, rows),
            Placed(self.uses.whole, whole),
            Placed(self.uses.syms, syms),
            args[start:],
            widths,
        )

    def _give_up(self, reason: str) -> None:
        self._eager = self._failed = True
        log.warning("a chunk body runs uncompiled, which is slower and takes more memory: %s", reason[:2000])


_bodies: dict[Any, Body] = {}
_bodies_lock = threading.Lock()


def get(key: Any, make: Callable[[], Body]) -> Body:
    """The body for ``key``, made on first use."""
    body = _bodies.get(key)
    if body is None:
        with _bodies_lock:
            body = _bodies.setdefault(key, make())
    return body


def cached() -> list[Body]:
    """Every body of this process."""
    return list(_bodies.values())


def clear() -> None:
    """Forgets every body (tests)."""
    with _bodies_lock:
        _bodies.clear()
