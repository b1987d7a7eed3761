"""The text of a segment program's kernel; :mod:`.kernels` says how it works."""

from __future__ import annotations

from collections.abc import Sequence

from inductor_grpo.seam.kernel_terms import TermWriter, indent, pointed

_FEW = 8  # a gap of so many segments is small
_DISORDER = 1000  # a larger finding than any gap: the id before is the larger
_WRAPPED = ["@triton.jit", "def wrapped(i, count):", "    return tl.where(i < 0, i + count, i)", "", ""]


class Writer(TermWriter):
    """Writes the kernel ``segments``."""

    def text(self) -> str:
        inputs = self.inputs()
        names = [f"SUM{k}" for k in range(len(self.sums))]
        names += [f"RESULT{k}" for k in range(len(self.program.returned))]
        outputs = [f"{n}: '*{pointed(d)}'" for n, d in zip(names, self.program.output_dtypes(), strict=True)]
        rest = ["WORK: '*i64'", "TICKET: '*i64'", "tokens: 'i32'", "count: 'i32'", "blocks: 'i32'"]
        parameters = [*inputs, *outputs, *rest]
        names = [p.partition(":")[0] for p in parameters]
        plain = [n for n in names if n[0].islower()]
        pointers = [n for n in names if n[0].isupper()]
        math = (
            "from inductor_grpo.seam import kernel_math as libdevice"
            if self.variant.interpreted
            else "from triton.language.extra import libdevice"
        )
        lines = ["import triton", "import triton.language as tl", math, "", ""]
        lines += self.terms([p.partition(":")[0] for p in inputs])
        lines += _WRAPPED if self.program.wraps else []
        lines += self.combine("add_runs", self.sums) if self.sums else []
        lines += self.merge()
        lines += [
            f"@triton.jit(do_not_specialize={plain!r}, do_not_specialize_on_alignment={pointers!r})",
            f"def segments({', '.join(parameters)}):",
            *indent(self._body([p.partition(":")[0] for p in inputs])),
        ]
        return "\n".join(lines) + "\n"

    def _body(self, inputs: Sequence[str]) -> list[str]:
        tile = self.variant.tile
        lines = [
            "block = tl.program_id(0)",
            f"lane = tl.arange(0, {tile.tokens})",
            "rows = ((blocks + 15) >> 4) << 4  # the sections of the scratch memory are aligned",
            f"at = block * {tile.tokens} + lane",
            "live = at < tokens",
            self._call_terms(inputs),
        ]
        single = self.variant.single
        if self.sums:
            lines += [
                *self._neighbours(),
                "hole = i - left - 1  # how many segments without tokens lie before this token",
                f"finding = tl.where(live, tl.where(left > i, {_DISORDER}, tl.minimum(hole, {_FEW + 1})), 0)",
                *(self._whole_runs() if single else self._runs()),
            ]
        lines += self._reduce()
        if self.sums:
            lines += self._gaps()
        if single:
            lines += self.store_results([f"part{k}" for k in range(len(self.totals))])
            if self.sums:
                again = ["tl.debug_barrier()", *self._zero(), "tl.debug_barrier()", *self._add("")]
                lines += ["if bad > 0:", *indent(again)]
            return lines
        lines += [f"tl.store({self._slot(k, kind)} + block, part{k})" for k, kind in enumerate(self.totals)]
        lines += ["tl.debug_barrier()"]
        step = "1 + (bad.to(tl.int64) << 32)" if self.sums else "tl.full([], 1, tl.int64)"
        lines += [f"before_me = tl.atomic_add(TICKET, {step}, sem='acq_rel', scope='gpu')"]
        if self.sums:
            lines += ["unsorted = (before_me >> 32).to(tl.int32) + bad"]
        lines += ["if (before_me & 0xFFFFFFFF) == blocks - 1:", *indent(self._finish())]
        if self.sums:
            lines += self._redo(inputs)
        return lines

    def _call_terms(self, inputs: Sequence[str], again: str = "") -> str:
        found = ["i", *(f"a{k}" for k in range(len(self.sums))), *(f"p{k}" for k in range(len(self.totals)))]
        names = ", ".join(again + name for name in found)
        return f"{names} = terms({again}at, {again}live, {', '.join(inputs)}, count)"

    def _id_at(self, name: str, at: str, mask: str = "") -> list[str]:
        loads = f"{name} = tl.load(IDS + {at}{', mask=' + mask + ', other=0' if mask else ''}).to(tl.int64)"
        wraps = [f"{name} = tl.where({name} < 0, {name} + count, {name})"] if self.program.wraps else []
        return [loads, *wraps, f"{name} = {name}.to(tl.int32)"]

    def _neighbours(self, again: str = "") -> list[str]:
        at, live = f"{again}at", f"{again}live"
        return [
            *self._id_at(f"{again}left", f"{at} - 1", f"{live} & ({at} > 0)"),
            *self._id_at(f"{again}right", f"{at} + 1", f"{at} + 1 < tokens"),
            f"{again}left = tl.where({at} > 0, {again}left, -1)",
            f"{again}right = tl.where({at} + 1 < tokens, {again}right, -1)",
            f"{again}starts = {again}left != {again}i",
            f"{again}ends = {again}right != {again}i",
        ]

    def _scan(self, flag: str, values: str, began: str, found: str) -> str:
        names = ", ".join(f"{found}{k}" for k in range(len(self.sums)))
        parts = ", ".join(f"{values}{k}" for k in range(len(self.sums)))
        return f"{began}, {names} = tl.associative_scan(({flag}, {parts}), 0, add_runs)"

    def _whole_runs(self) -> list[str]:
        lines = [self._scan("starts.to(tl.int32)", "a", "f", "r")]
        return lines + [f"tl.store(SUM{k} + i, r{k}, mask=live & ends)" for k in range(len(self.sums))]

    def _runs(self) -> list[str]:
        n = len(self.sums)
        lines = [
            self._scan("starts.to(tl.int32)", "a", "f", "r"),
            "inside = f != 0  # the run of this token began in this tile",
            f"last = live & ((lane == {self.variant.tile.tokens - 1}) | (at == tokens - 1))",
            "# One lane has the head: the first if a run begins there, else that at which the first run leaves.",
            "head = live & (((lane == 0) & starts) | (~inside & (ends | last)))",
        ]
        for k in range(n):
            zero = f"tl.full([], 0, {self.sums[k]})"
            lines += [
                f"tl.store(SUM{k} + i, r{k}, mask=live & inside & ends)",
                f"tl.store({self._head(k)} + block + lane * 0, tl.where(inside, {zero}, r{k}), mask=head)",
                f"tl.store({self._tail(k)} + block + lane * 0, tl.where(inside & ~ends, r{k}, {zero}), mask=last)",
            ]
        return [
            *lines,
            f"tl.store({self._meta()} + block + lane * 0, tl.where(~inside & ends, i, -1), mask=head)",
            f"tl.store({self._meta()} + rows + block + lane * 0, (inside & ~ends).to(tl.int32), mask=last)",
        ]

    def _reduce(self) -> list[str]:
        values = [f"p{k}" for k in range(len(self.totals))]
        found = [f"part{k}" for k in range(len(self.totals))]
        if self.sums:
            values, found = [*values, "finding"], [*found, "most"]
        if not values:
            return []
        reduced = values[0] if len(values) == 1 else f"({', '.join(values)})"
        lines = [f"{', '.join(found)} = tl.reduce({reduced}, 0, merge)"]
        return [*lines, f"bad = (most == {_DISORDER}).to(tl.int32)"] if self.sums else lines

    def _gaps(self) -> list[str]:
        """Zeros for the segments without tokens: by token if all gaps are small, else by segment, with a search."""
        tokens = self.variant.tile.tokens
        steps = tokens.bit_length() - 1
        few = [
            "for j in range(0, most):",
            *(
                f"    tl.store(SUM{k} + left + 1 + j, {_zeros(t, tokens)}, mask=live & (j < hole))"
                for k, t in self._enumerated()
            ),
        ]
        many = [
            f"size = tl.minimum(tokens - block * {tokens}, {tokens})",
            f"low = tl.where(block > 0, {self._scalar_id(f'block * {tokens} - 1', 'block > 0')}, -1) + 1",
            f"high = {self._scalar_id(f'block * {tokens} + size - 1')}",
            f"for z in range(low, high, {tokens}):",
            "    segment = z + lane",
            "    place = lane * 0  # the first token of the tile whose id is not below the segment, by bisection",
            f"    for step in tl.static_range(0, {steps}):",
            f"        probe = place + ({tokens // 2} >> step)",
            *indent(self._id_at("seen", f"block * {tokens} + probe - 1", "probe <= size"), 2),
            "        place = tl.where((probe <= size) & (seen < segment), probe, place)",
            *indent(self._id_at("seen", f"block * {tokens} + place", "place < size")),
            "    empty = (segment >= 0) & (segment < high) & (segment < count) & (seen != segment)",
            *(f"    tl.store(SUM{k} + segment, {_zeros(t, tokens)}, mask=empty)" for k, t in self._enumerated()),
        ]
        rest = [
            f"end = tl.maximum({self._scalar_id('tokens - 1')} + 1, 0)",
            f"for z in range(end, count, {tokens}):",
            *(
                f"    tl.store(SUM{k} + z + lane, {_zeros(t, tokens)}, mask=z + lane < count)"
                for k, t in self._enumerated()
            ),
        ]
        return [
            f"if most <= {_FEW}:",
            *indent(few),
            "elif bad == 0:",
            *indent(many),
            *(["if block == blocks - 1:", *indent(rest)] if not self.variant.single else rest),
        ]

    def _scalar_id(self, at: str, mask: str = "") -> str:
        load = f"tl.load(IDS + {at}{', mask=' + mask + ', other=0' if mask else ''}).to(tl.int32)"
        return f"wrapped({load}, count)" if self.program.wraps else load

    def _zero(self) -> list[str]:
        tokens = self.variant.tile.tokens
        return [
            f"for z in range(0, count, {tokens}):",
            *(
                f"    tl.store(SUM{k} + z + lane, {_zeros(t, tokens)}, mask=z + lane < count)"
                for k, t in self._enumerated()
            ),
        ]

    def _add(self, again: str) -> list[str]:
        at = f"SUM{{}} + {again}i"
        return [
            f"tl.atomic_add({at.format(k)}, {again}r{k}, mask={again}live & {again}ends, sem='relaxed')"
            for k in range(len(self.sums))
        ]

    def _finish(self) -> list[str]:
        """The last block: pieces joined, parts of totals added."""
        pieces = self.variant.tile.pieces
        cached = "cache_modifier='.cg'"
        lines = [f"piece = tl.arange(0, {pieces})"]
        lines += [f"all{k} = tl.zeros([{pieces}], {t})" for k, t in enumerate(self.totals)]
        lines += [f"carry{k} = tl.full([], 0, {t})" for k, t in self._enumerated()]
        loop = ["b = c + piece", "known = b < blocks"]
        for k, t in enumerate(self.totals):
            loop += [f"all{k} += tl.load({self._slot(k, t)} + b, mask=known, other=0, {cached})"]
        if self.sums:
            loop += [
                "earlier = known & (b > 0)",
                f"opened = tl.load({self._meta()} + rows + b - 1, mask=earlier, other=1, {cached})",
                "joins = known & (b >= tl.minimum(unsorted, 1) * blocks)  # none of them, if ids are out of order",
                f"closes = tl.load({self._meta()} + b, mask=joins, other=-1, {cached})",
            ]
            for k, _ in self._enumerated():
                loop += [
                    f"h{k} = tl.load({self._head(k)} + b, mask=known, other=0, {cached})",
                    f"u{k} = tl.load({self._head(k)} + b - 1, mask=earlier, other=0, {cached})",
                    f"v{k} = tl.load({self._tail(k)} + b - 1, mask=earlier, other=0, {cached})",
                    f"e{k} = tl.where(opened != 0, v{k}, u{k})",
                ]
            loop += [self._scan("opened", "e", "chain", "joined")]
            for k, t in self._enumerated():
                loop += [
                    f"joined{k} = tl.where(chain != 0, joined{k}, carry{k} + joined{k})",
                    f"tl.store(SUM{k} + closes, joined{k} + h{k}, mask=known & (closes >= 0))",
                    f"carry{k} = tl.sum(tl.where(piece == {pieces - 1}, joined{k}, tl.full([], 0, {t})), 0)",
                ]
        lines += [f"for c in range(0, blocks, {pieces}):", *indent(loop)]
        lines += self.store_results([f"tl.sum(all{k}, 0)" for k in range(len(self.totals))])
        if not self.sums:
            return [*lines, "tl.store(TICKET, tl.full([], 0, tl.int64))"]
        # Opening the counter of tiles lets in the blocks that wait; its upper half says how many take part.
        return [
            *lines,
            "if unsorted > 0:",
            *indent(self._zero()),
            "    tl.debug_barrier()",
            "    taking = (unsorted - bad + 1).to(tl.int64) << 32",
            "    tl.atomic_add(TICKET + 1, taking + 1, sem='acq_rel', scope='gpu')",
            "else:",
            "    tl.store(TICKET, tl.full([], 0, tl.int64))",
        ]

    def _redo(self, inputs: Sequence[str]) -> list[str]:
        """Ids out of order: all tokens again, by atomics, shared among the last block and those that waited for it."""
        tile = self.variant.tile
        look = "tl.atomic_add(TICKET + 1, tl.full([], 0, tl.int64), sem='acq_rel', scope='gpu')"
        take = "(tl.atomic_add(TICKET + 1, tl.full([], 1, tl.int64), sem='acq_rel', scope='gpu') & 0xFFFFFFFF) - 1"
        reset = [
            f"tl.atomic_xchg(TICKET + {k}, tl.full([], 0, tl.int64), sem='relaxed', scope='gpu')" for k in range(3)
        ]
        return [
            "if (bad > 0) | (((before_me & 0xFFFFFFFF) == blocks - 1) & (unsorted > 0)):",
            f"    state = {look}",
            "    rounds = 0",
            f"    while (state == 0) & (rounds < {tile.rounds}):",
            f"        state = {look}",
            "        rounds += 1",
            "    if state != 0:",
            f"        mine = {take}",
            "        while mine < blocks:",
            f"            again_at = mine.to(tl.int32) * {tile.tokens} + lane",
            "            again_live = again_at < tokens",
            f"            {self._call_terms(inputs, 'again_')}",
            *indent(self._neighbours("again_"), 3),
            "            again_starts = again_starts | (lane == 0)",
            f"            again_ends = again_ends | (lane == {tile.tokens - 1})",
            "            " + self._scan("again_starts.to(tl.int32)", "again_a", "again_f", "again_r"),
            *indent(self._add("again_"), 3),
            f"            mine = {take}",
            "    # Who leaves last, with or without work, puts the words back to zero; only then is the number known.",
            "    gone = tl.atomic_add(TICKET + 2, tl.full([], 1, tl.int64), sem='acq_rel', scope='gpu')",
            f"    taking_part = {look} >> 32",
            "    if gone == taking_part - 1:",
            *indent(reset, 2),
        ]

    # Places in the scratch memory: sections of one eight-byte slot a block

    def _slot(self, section: int, kind: str) -> str:
        return f"(WORK + {section} * rows).to(tl.pointer_type({kind}))"

    def _head(self, k: int) -> str:
        return self._slot(len(self.totals) + 2 * k, self.sums[k])

    def _tail(self, k: int) -> str:
        return self._slot(len(self.totals) + 2 * k + 1, self.sums[k])

    def _meta(self) -> str:
        return self._slot(len(self.totals) + 2 * len(self.sums), "tl.int32")

    def _enumerated(self) -> list[tuple[int, str]]:
        return list(enumerate(self.sums))


def _zeros(kind: str, tokens: int) -> str:
    return f"tl.zeros([{tokens}], {kind})"
