"""The text of the kernel ``rows_of`` of a plan: one program a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.fx as fx

from ..graph import aten, prims
from ..seam.calls import call_of
from ..seam.expressions import Unsupported, Value, cast, expression, held, result
from ..seam.kernel_terms import host_type, indent
from ..seam.program import Call, accumulator
from . import live as flags
from .arguments import Inputs, Store, Tile, filled, pointed, pointer_of, read
from .recognise import VIEWS, Leaf, Reduction, RowPlan, Unfit, through_views

_HALF = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}
_NEUTRAL = {"max": 'float("-inf")', "min": 'float("inf")', "sum": "0", "mean": "0"}


class _Columns(NamedTuple):
    """A tile of the row: the text of its columns and of its mask ("": all are in the row), and its wide values."""

    at: str
    live: str
    values: dict[str, Value]


class Text(NamedTuple):
    """The module text of a kernel; the logits, by place, that it tests for finite rows; whether it can skip rows."""

    source: str
    checked: frozenset[int]
    skips: bool


def write(plan: RowPlan, inputs: Inputs, stores: Sequence[Store], tile: Tile, interpreted: bool) -> Text:
    """The text of the kernel.  Its arguments: logits, rows, whole and integers that the plan reads, each in order, then
    the stores with memory of their own, then for each of :func:`filled` where its live rows go, and, if it skips,
    whether it is to.  Raises Unfit."""
    try:
        writer = _Writer(plan, inputs, stores, tile, interpreted)
        checked = frozenset(writer.finite.places.values())
        return Text(writer.text(), checked, writer.skipping.conditions is not None)
    except Unsupported as error:
        raise Unfit(str(error)) from None


class _Writer:
    def __init__(self, plan: RowPlan, inputs: Inputs, stores: Sequence[Store], tile: Tile, interpreted: bool) -> None:
        self.plan, self.inputs, self.stores, self.tile, self.interpreted = plan, inputs, stores, tile, interpreted
        self.names = {node: f"v{i}" for i, node in enumerate(plan.nodes)}
        self.values: dict[str, Value] = {}
        """Row values by "%name", as far as they are written."""
        self.lines: list[str] = []
        self.labels: dict[fx.Node, str] = {}
        # By the hardware's exp2, with an error of 2**-24 of the exponent, where rounding the logits made one of 2**-12.
        self.approximates = all(dtype.itemsize < 4 for dtype in inputs.logits)
        self.filled = filled(plan, stores)
        self.rereads = len(plan.passes) + any(out in plan.wide for out in plan.outputs)
        written = [plan.outputs[i] for i in self.filled]
        self.finite = flags.Finite(plan, written, tile.columns)
        self.skipping = flags.Skipping(plan, written, self.finite)

    # The kernel

    def text(self) -> str:
        plan = self.plan
        math = "inductor_grpo.seam import kernel_math as libdevice"
        if not self.interpreted:
            math = "triton.language.extra import libdevice"
        body = self._body()
        parameters = self._parameters()
        names = [p.partition(":")[0] for p in parameters]
        small = [n for n in names if n.startswith(("R", "W", "OUT", "LIVE")) and not self._is_vector(n)]
        plain = [n for n in names if n[0].islower()]
        return "\n".join(
            [
                "import triton",
                "import triton.language as tl",
                "from inductor_grpo.row_kernel import statistics",
                f"from {math}",
                "",
                "",
                f"@triton.jit(do_not_specialize={plain!r}, do_not_specialize_on_alignment={small!r})",
                f"def rows_of({', '.join(parameters)}):",
                f"    # {len(plan.passes)} passes that reduce {plan.columns} columns",
                *indent(body),
                "",
            ]
        )

    def _parameters(self) -> list[str]:
        found = []
        for leaf in read(self.plan):
            if leaf.kind == "syms":
                found.append(f"n{leaf.place}: 'i64'")
            elif leaf.kind == "whole" and self.inputs.host[leaf.place]:
                found.append(f"w{leaf.place}: '{host_type(self.inputs.whole[leaf.place])}'")
            else:
                found.append(f"{pointer_of(leaf)}: '*{pointed(getattr(self.inputs, leaf.kind)[leaf.place])}'")
        stores = enumerate(self.stores)
        found += [f"OUT{i}: '*{pointed(store.dtype)}'" for i, store in stores if store.buffer is None]
        found += [f"LIVE{i}: '*i8'" for i in self.filled]
        return found + (["skips: 'i32'"] if self.skipping.conditions is not None else [])

    def _is_vector(self, pointer: str) -> bool:
        if pointer.startswith("OUT"):
            return self.plan.outputs[int(pointer[3:])] in self.plan.wide
        return any(pointer_of(leaf) == pointer and node in self.plan.wide for node, leaf in self.plan.leaves.items())

    def _body(self) -> list[str]:
        plan = self.plan
        self.lines = [
            "row = tl.program_id(0).to(tl.int64)",
            f"before = row * {plan.columns}  # elements of the rows before this one",
            f"lane = tl.arange(0, {self.tile.columns})",
        ]
        for level, reductions in enumerate(plan.passes):
            self._row_values(level)
            self._pass(level, reductions)
            self.lines += self.finite.end(level)
        self._row_values(len(plan.passes))
        self._store_rows()
        self._store_wide()
        return self.lines

    # Row values

    def _row_values(self, level: int) -> None:
        """The numbers that can be computed once ``level`` passes are over."""
        reduced = self.plan.reduced()
        for node in self.plan.nodes:
            if node in self.plan.wide or self.plan.need[node] != level or node in reduced:
                continue
            if node.target is aten.gather.default:
                self._gather(node)
            else:
                self._write(node, self.values, "", "")

    def _write(self, node: fx.Node, values: dict[str, Value], prefix: str, at: str, mask: str = "") -> None:
        """One node as a line, or as another name of what it shows; ``at`` is the column or columns of a wide one."""
        name = prefix + self.names[node]
        leaf = self.plan.leaves.get(node)
        if leaf is not None:
            values["%" + self.names[node]] = self._leaf(node, leaf, name, at, mask)
            return
        target = node.target
        if target in VIEWS:
            shown = values["%" + self.names[node.args[0]]]  # type: ignore[index]
            value = dataclasses.replace(shown, per_token=node.meta["val"].dim() > 0)
        elif target is prims.iota.default:
            start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
            number = f"{at}.to(tl.int64)" + (f" * {step} + {start}" if (start, step) != (0, 1) else "")
            value = Value(f"({number})", torch.int64, True)
        elif (text := self._is_label(node, at)) is not None:
            self.lines.append(f"{name} = {text}")
            value = Value(name, torch.bool, True)
        else:
            call = self._call(node, name)
            text = expression(call, values)
            if prefix and self.approximates and node.target is aten.exp.default:
                text = f"tl.exp({cast(values['%' + self.names[node.args[0]]], node.meta['val'].dtype)})"  # type: ignore[index]
            self.lines.append(f"{name} = {text}")
            value = dataclasses.replace(result(call, values), per_token=node.meta["val"].dim() > 0)
        values["%" + self.names[node]] = value

    def _call(self, node: fx.Node, name: str) -> Call:
        return call_of(node, name, lambda a: "%" + self.names[a])

    def _leaf(self, node: fx.Node, leaf: Leaf, name: str, at: str, mask: str) -> Value:
        if leaf.kind == "syms":
            return Value(f"n{leaf.place}.to(tl.int64)", torch.int64, False, wrapped=True)
        dtype = getattr(self.inputs, leaf.kind)[leaf.place]
        wide = node in self.plan.wide
        pointer = pointer_of(leaf)
        if leaf.kind == "whole" and self.inputs.host[leaf.place]:
            text = f"w{leaf.place}"
        elif leaf.kind == "whole":
            text = (
                f"tl.load({pointer} + ({at}) * {self.inputs.strides[leaf.place]}{mask})"
                if wide
                else f"tl.load({pointer})"
            )
        else:
            text = f"tl.load({pointer} + before + {at}{mask})" if wide else f"tl.load({pointer} + row)"
        kind = held(dtype)
        self.lines.append(f"{name} = ({text} != 0)" if kind == "tl.int1" else f"{name} = ({text}).to({kind})")
        return Value(name, dtype, node.meta["val"].dim() > 0)

    def _is_label(self, node: fx.Node, at: str) -> str | None:
        """``column == label``, compared in 32 bits: a label that is no column becomes -1."""
        if node.target is not aten.eq.Tensor:
            return None
        sides = [through_views(a) for a in node.args]
        for counter, label in (sides, sides[::-1]):
            counts = isinstance(counter, fx.Node) and counter.target is prims.iota.default
            if not counts or counter.kwargs.get("start", 0) != 0 or counter.kwargs.get("step", 1) != 1:
                continue
            if not isinstance(label, fx.Node) or label in self.plan.wide or label.meta["val"].dtype != torch.int64:
                continue
            return f"{at} == {self._label(label)}"
        return None

    def _label(self, label: fx.Node) -> str:
        text = self.values["%" + self.names[label]].text
        return f"tl.where(({text} >= 0) & ({text} < {self.plan.columns}), {text}, -1).to(tl.int32)"

    def _gather(self, node: fx.Node) -> None:
        """One element of a wide value: the same maths at one column."""
        source, index = node.args[0], node.args[2]
        assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
        name, at = self.names[node], f"at_{self.names[node]}"
        label = self.values["%" + self.names[index]]
        columns = self.plan.columns
        inside = f"({label.text} >= 0) & ({label.text} < {columns})"
        self.lines += [
            f'tl.device_assert({inside}, "index out of bounds: a label is not in [0, {columns})")',
            f"{at} = tl.where({inside}, {label.text}, 0)  # memory stays safe where assertions are off",
        ]
        values = dict(self.values)
        for wide in self.plan.wide_before([source]):
            self._write(wide, values, f"{name}_", at)
        self.values["%" + name] = dataclasses.replace(values["%" + self.names[source]], per_token=True)

    # Passes

    def _over_columns(
        self, number: int, targets: Sequence[fx.Node], use: Callable[[list[_Columns]], list[str]]
    ) -> None:
        """A pass over the row: ``use`` gives what is done with the wide values of some tiles.

        Whole blocks of tiles run in a loop without masks; what is left of the row follows as one more, with masks."""
        columns, tile = self.plan.columns, self.tile
        step = tile.columns * tile.parts
        whole = columns // step * step
        self.lines += self.finite.begin(number)
        if whole:
            self.lines.append(f"for start in range(0, {whole}, {step}):")
            self.lines += indent(self._block(number, targets, tile.parts, False, use))
        if whole < columns:
            self.lines.append(f"start = {whole}")
            self.lines += self._block(number, targets, -(-(columns - whole) // tile.columns), True, use)

    def _block(
        self,
        number: int,
        targets: Sequence[fx.Node],
        parts: int,
        masked: bool,
        use: Callable[[list[_Columns]], list[str]],
    ) -> list[str]:
        outer, self.lines = self.lines, []
        policy = "evict_last" if number + 1 < self.rereads else "evict_first"
        tiles = []
        for k in range(parts):
            at, live = f"at{k}", f"live{k}" if masked else ""
            self.lines.append(f"{at} = start + {k * self.tile.columns} + lane" if k else f"{at} = start + lane")
            if masked:
                self.lines.append(f"{live} = {at} < {self.plan.columns}")
            tiles.append(_Columns(at, live, dict(self.values)))
        for k, tile in enumerate(tiles):
            mask = f", mask={tile.live}, other=0" if masked else ""
            for node in self.plan.wide_before(targets):
                leaf = self.plan.leaves.get(node)
                hint = f", eviction_policy='{policy}'" if leaf is not None and leaf.kind != "whole" else ""
                prefix = f"p{number}{'abcdefgh'[k]}_"
                self._write(node, tile.values, prefix, tile.at, mask + hint)
                self.lines += self.finite.add(number, node, prefix + self.names[node])
        found = self.lines + use(tiles)
        self.lines = outer
        return found

    def _pass(self, number: int, reductions: Sequence[Reduction]) -> None:
        for r in reductions:
            shape, kind = f"[{self.tile.columns}]", self._accumulator(r)
            self.lines.append(f"{r.kind}_{self.names[r.node]} = tl.full({shape}, {_NEUTRAL[r.kind]}, {kind})")
            if r.sums:
                self.lines.append(f"exp_{self.names[r.node]} = tl.full({shape}, 0, {kind})")

        def reduced(tiles: list[_Columns]) -> list[str]:
            return [line for r in reductions for line in self._reduced(r, tiles)]

        self._over_columns(number, [r.source for r in reductions], reduced)
        for r in reductions:
            name = self.names[r.node]
            kept = f"{r.kind}_{name}"
            if r.kind in ("sum", "mean"):
                self.lines.append(f"{name} = tl.sum({kept}, 0){f' / {self.plan.columns}' if r.kind == 'mean' else ''}")
            else:
                self.lines.append(f"{name} = statistics.{'largest' if r.kind == 'max' else 'smallest'}({kept})")
            self.lines += [
                f"{self.names[node]} = statistics.{'finite_total' if safe else 'total'}({kept}, exp_{name}, {name})"
                for node, safe in r.sums
            ]
            for node in (r.node, *(node for node, _ in r.sums)):
                dtype = node.meta["val"].dtype
                if dtype in _HALF:
                    self.lines.append(f"{self.names[node]} = {self.names[node]}.to({_HALF[dtype]}).to(tl.float32)")
                self.values["%" + self.names[node]] = Value(self.names[node], dtype, True)

    def _reduced(self, r: Reduction, tiles: list[_Columns]) -> list[str]:
        """What a reduction keeps, with some tiles more."""
        name, kind, neutral = self.names[r.node], self._accumulator(r), _NEUTRAL[r.kind]
        kept, lines, elements = f"{r.kind}_{name}", [], []
        for k, tile in enumerate(tiles):
            x = f"({cast(tile.values['%' + self.names[r.source]], self._summed(r))}).to({kind})"
            elements.append(f"x{k}_{name}")
            lines.append(f"x{k}_{name} = {f'tl.where({tile.live}, {x}, {neutral})' if tile.live else x}")
        if r.kind in ("sum", "mean"):
            return lines + [f"{kept} += {x}" for x in elements]
        step = "larger" if r.kind == "max" else "smaller"
        if not r.sums:
            return lines + [f"{kept} = statistics.{step}({kept}, {x})" for x in elements]
        lines += [f"top_{name} = {kept}", *(f"top_{name} = statistics.larger(top_{name}, {x})" for x in elements)]
        lines += [
            f"base_{name} = statistics.base(top_{name})",
            f"exp_{name} = exp_{name} * tl.exp({kept} - base_{name})",
            *(f"exp_{name} += tl.exp({x} - base_{name})" for x in elements),
        ]
        return [*lines, f"{kept} = top_{name}"]

    @staticmethod
    def _summed(r: Reduction) -> torch.dtype:
        """The dtype in which a source is added up or compared."""
        given, found = r.source.meta["val"].dtype, r.node.meta["val"].dtype
        return given if r.kind in ("max", "min") or given == found else accumulator(found)

    def _accumulator(self, r: Reduction) -> str:
        return held(accumulator(r.node.meta["val"].dtype))

    # Outputs

    def _store_rows(self) -> None:
        for i, out in enumerate(self.plan.outputs):
            if i not in self.filled:
                self.lines.append(f"tl.store(OUT{i} + row, {self._stored(out, i, self.values)})")

    def _store_wide(self) -> None:
        if not self.filled:
            return
        if self.skipping.conditions is None:
            self._write_rows()
            return
        test = self.skipping.test(lambda node: self.values["%" + self.names[node]])
        self.lines.append(f"known_zero = {test}")
        outer, self.lines = self.lines, []
        self._write_rows()
        outer.append("if ((skips != 0) & known_zero) == 0:")
        outer += indent(self.lines)
        self.lines = [*outer, "else:", *indent([flags.dead(i) for i in self.filled])]

    def _write_rows(self) -> None:
        """The last pass."""
        number, outputs = len(self.plan.passes), [self.plan.outputs[i] for i in self.filled]
        if any(node.target is aten.gather.default for node in self.plan.nodes):
            self.lines.append("tl.debug_barrier()  # no warp may write over an element that another has yet to pick")
        kinds = [out.meta["val"].dtype for out in outputs]
        if not self.finite.first_read:
            self.lines.append("spoilt = tl.full([], 0, tl.int32)  # no row of logits is read")
        self.lines += [flags.begin_bits(i, kind, self.tile.columns) for i, kind in zip(self.filled, kinds)]

        def stored(tiles: list[_Columns]) -> list[str]:
            lines = []
            for tile in tiles:
                mask = f", mask={tile.live}" if tile.live else ""
                for i, out in zip(self.filled, outputs):
                    buffer = self.stores[i].buffer
                    pointer = f"OUT{i}" if buffer is None else f"Z{buffer}"
                    value = self._stored(out, i, tile.values)
                    lines.append(f"tl.store({pointer} + before + {tile.at}, {value}{mask})")
                    lines.append(flags.add_bits(i, tile.values["%" + self.names[out]], tile.live))
            return lines

        self._over_columns(number, outputs, stored)
        self.lines += self.finite.end(number)
        self.lines += [flags.end_bits(i, kind) for i, kind in zip(self.filled, kinds)]

    def _stored(self, out: fx.Node, i: int, values: dict[str, Value]) -> str:
        value, dtype = values["%" + self.names[out]], self.stores[i].dtype
        kind = _HALF.get(dtype, held(dtype))
        text = cast(value, value.dtype)
        return f"({text}).to({'tl.int8' if dtype == torch.bool else kind})"


__all__ = ["Inputs", "Store", "Text", "Tile", "filled", "read", "write"]
