"""Turning a chunk program into one that runs over tiles of the vocabulary, where patterns allow it.

Patterns replace what they recognise by online statistics.  If then every reduction over the vocabulary is one that can
be kept online, and no vocabulary-sized value needs a finished one, a single pass is enough: the body falls apart into
what one tile computes, and a finish that computes the row values from the statistics.  A gathered element is picked
from the logits before the maths instead of after it: ``gather(f(z), label) = f(gather(z, label))`` for pointwise f.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, cast

import torch
import torch.fx as fx

from ._compat import matcher
from .capture import note
from .config import Settings
from .draft import Draft, Output, print_function
from .graph import aten, hint, map_args, node_arg, prims, same, shape, value
from .pattern import all_patterns, recognise, statistic
from .program import Sink, TileProgram
from .rules.pointwise import is_pointwise

_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.amax.default: "max", aten.amin.default: "min"}


class NotOnline(Exception):
    """The program needs more than one pass over the vocabulary, or has an operation that a tile cannot see."""


def as_tiles(
    draft: Draft, places: list[int], sinks: tuple[Sink, ...], settings: Settings
) -> tuple[TileProgram, list[str]] | None:
    """The outputs at ``places``, which the draft's ``sinks`` keep, as a tile program, with the names of the patterns
    that took part; None when it takes more than one pass over the vocabulary."""
    if not draft.projections or len({str(hint(v)) for v in _vocabularies(draft)}) != 1:
        return None
    try:
        return _Tiling(draft, [draft.outputs[p] for p in places], settings).program(sinks)
    except NotOnline as reason:
        note(f"no vocabulary tiles: {reason}")
        return None


def _vocabularies(draft: Draft) -> list[Any]:
    whole = list(draft.whole_inputs)
    return [shape(whole[p.weight])[1] for p in draft.projections]


class _Tiling:
    def __init__(self, draft: Draft, outputs: list[Output], settings: Settings) -> None:
        self.draft, self.settings, self.outputs = draft, settings, outputs
        self.vocabulary = _vocabularies(draft)[0]
        self.body = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        self.body.graph_copy(draft.graph, env)
        self.values = [self._converted(env[out.value], out) for out in outputs]
        self.body.output(tuple(self.values))
        self._find_dtypes()
        for node in list(self.body.nodes):  # broadcasting does what they say
            if node.target is aten.expand.default:
                node.replace_all_uses_with(node.args[0])
                self.body.erase_node(node)
        self.tile, self.finish = fx.Graph(), fx.Graph()
        self.tile_in = {
            p: self.tile.placeholder(p) for p in ("n", "start", "columns", "logits", "rows", "whole", "syms")
        }
        self.finish_in = {p: self.finish.placeholder(p) for p in ("n", "statistics", "rows", "whole", "syms")}
        self.results: list[tuple[str, fx.Node]] = []
        self.sliced: dict[str, set[int]] = {"rows": set(), "whole": set()}
        self._kept: dict[Any, fx.Node] = {}
        self._wide: dict[fx.Node, bool] = {}
        self._tiled: dict[fx.Node, fx.Node] = {}
        self._finished: dict[fx.Node, fx.Node] = {}
        self._softmaxes: dict[fx.Node, str] = {}

    def _converted(self, node: fx.Node, out: Output) -> fx.Node:
        for dtype in out.casts:
            node = self.body.call_function(prims.convert_element_type.default, (node, dtype))
        return node

    def program(self, sinks: tuple[Sink, ...]) -> tuple[TileProgram, list[str]]:
        """The whole conversion: recognise, take apart, print."""
        patterns = self._recognise()
        new_sinks: list[Sink] = []
        row_values: list[fx.Node] = []
        wide: list[fx.Node] = []
        output = next(n for n in reversed(self.body.nodes) if n.op == "output")
        self.values = list(cast("tuple[fx.Node, ...]", output.args[0]))
        for out, sink, node in zip(self.outputs, sinks, self.values, strict=True):
            into, final = (row_values, self.in_finish) if out.kind == "row" else (wide, self.in_tile)
            if out.kind == "row" and self.is_wide(node):
                raise NotOnline("a row output is as wide as the vocabulary")
            new = final(node)
            if new not in into:
                into.append(new)
            new_sinks.append(dataclasses.replace(sink, value=into.index(new)))
        if not patterns and not wide:
            raise NotOnline("nothing here was recognised")
        dtypes: dict[fx.Node, Any] = {new: old.meta.get("dtype") for old, new in self._tiled.items()}
        results = [f"{kind}/{_name(node.meta.get('dtype') or dtypes[node])}" for kind, node in self.results]
        results += [f"wide/{_name(dtypes[node])}" for node in wide]
        tile = print_function(self.tile, "tile", [node for _, node in self.results] + wide)
        finish = print_function(self.finish, "finish", row_values)
        rows, whole = (tuple(sorted(self.sliced[k])) for k in ("rows", "whole"))
        return TileProgram(
            tuple(self.draft.projections), tile, tuple(results), finish, tuple(new_sinks), rows, whole
        ), patterns

    # Recognising

    def _recognise(self) -> list[str]:
        found, patterns = [], all_patterns()
        for name in sorted(patterns, key=lambda name: not patterns[name].weighted):
            if name not in self.settings.disable and recognise(name, self.body):
                found.append(name)
        for node in self.body.nodes:
            if node.target is statistic:
                z, name, _ = _marked(node)
                weighted = patterns[name].weighted or self._softmaxes.get(z) == "softmax_weighted"
                self._softmaxes[z] = "softmax_weighted" if weighted else "softmax"
        return found

    def _find_dtypes(self) -> None:
        """The dtype of every value of the body, from a run on fake tensors."""
        whole, rows = list(self.draft.whole_inputs), list(self.draft.row_inputs)
        logits = [(value(rows[p.hidden].node).dtype, hint(shape(whole[p.weight])[1])) for p in self.draft.projections]
        matcher.propagate_dtypes(
            self.body,
            5,
            logits,
            [value(r.node) for r in rows],
            [value(w) for w in whole],
            [hint(value(s)) for s in self.draft.sizes],
        )

    # What is vocabulary-sized

    def _source(self, node: fx.Node) -> tuple[str, int] | None:
        """("rows", 3) for ``rows[3]``."""
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and parent.op == "placeholder":
            return parent.name, cast(int, node.args[1])
        return None

    def is_wide(self, node: fx.Node) -> bool:
        """Has a value for each column."""
        if node not in self._wide:
            self._wide[node] = self._find_wide(node)
        return self._wide[node]

    def _find_wide(self, node: fx.Node) -> bool:
        source = self._source(node)
        if source is not None:
            kind, index = source
            if kind in ("logits", "syms"):
                return kind == "logits"
            outer = list(self.draft.row_inputs)[index].node if kind == "rows" else list(self.draft.whole_inputs)[index]
            sizes = shape(outer)
            return len(sizes) == 2 and same(sizes[1], self.vocabulary)
        if node.target is prims.iota.default:
            return True
        if node.target in _REDUCTIONS or node.target in (statistic, aten.gather.default):
            return False
        wide = any(self.is_wide(a) for a in node.all_input_nodes)
        if node.target is aten.index.Tensor:  # must pick rows of a whole mask
            indices = cast("list[Any]", node.args[1])
            if len(indices) != 1 or self._source(node_arg(node, 0)) is None:
                raise NotOnline("columns are chosen by index")
        if wide and not (is_pointwise(node.target) or node.target in (aten.reshape.default, aten.index.Tensor)):
            raise NotOnline(f"{node.target} needs all columns at once")
        return wide

    # One tile

    def in_tile(self, node: fx.Node) -> fx.Node:
        """A value as one tile computes it; it must not need a finished statistic."""
        if node not in self._tiled:
            self._tiled[node] = new = self._in_tile(node)
            new.meta["dtype"] = node.meta.get("dtype")  # none for a number
        return self._tiled[node]

    def _in_tile(self, node: fx.Node) -> fx.Node:
        source = self._source(node)
        if source is not None:
            kind, index = source
            if kind in self.sliced and self.is_wide(node):
                self.sliced[kind].add(index)
            return self.tile.call_function(operator.getitem, (self.tile_in[kind], index))
        self.is_wide(node)  # refuses what a tile cannot see
        if node.target in _REDUCTIONS or node.target in (statistic, aten.gather.default):
            raise NotOnline("a vocabulary-sized value needs a finished reduction")
        if node.target is prims.iota.default:
            iota = self.tile.call_function(node.target, (self.tile_in["columns"],), dict(node.kwargs))
            return self.tile.call_function(aten.add.Tensor, (iota, self.tile_in["start"]))
        if node.target is aten.reshape.default and self.is_wide(node):
            return _call(self.tile, node.target, self.in_tile(node_arg(node, 0)), [1, self.tile_in["columns"]])
        if not (
            is_pointwise(node.target)
            or node.target in (aten.full.default, aten.index.Tensor, aten.reshape.default, aten.select.int)
        ):
            raise NotOnline(f"{node.target} needs all columns at once")
        args, kwargs = map_args(node, self.in_tile)
        return _call(self.tile, node.target, *args, **kwargs)

    # After the last tile

    def in_finish(self, node: fx.Node) -> fx.Node:
        """A row value, from the statistics."""
        if node not in self._finished:
            self._finished[node] = self._in_finish(node)
        return self._finished[node]

    def _in_finish(self, node: fx.Node) -> fx.Node:
        source = self._source(node)
        if source is not None:
            return self.finish.call_function(operator.getitem, (self.finish_in[source[0]], source[1]))
        if node.op == "placeholder":
            return self.finish_in[node.name]
        if node.target is statistic:
            z, name, index = _marked(node)
            m, s, t = self._softmax(z)
            spelling = all_patterns()[name].spellings[index]
            online = matcher.trace(spelling.online, *(torch.empty(4, 1) for _ in range(3)))
            return matcher.inline(self.finish, online, (m, s, t if t is not None else s))
        if node.target in _REDUCTIONS:
            x = node_arg(node, 0)
            if not self.is_wide(x):
                raise NotOnline("a reduction of something that is not vocabulary-sized")
            if x in self._softmaxes and node.target is aten.amax.default:
                return self._softmax(x)[0]
            if x.meta["dtype"] != node.meta["dtype"]:  # a count of bools, or a sum with a dtype of its own
                x = self.body.call_function(prims.convert_element_type.default, (x, node.meta["dtype"]))
                x.meta["dtype"] = node.meta["dtype"]
            return self._keep(_REDUCTIONS[node.target], self.in_tile(x))
        if node.target is aten.gather.default:
            return self._pick(node_arg(node, 0), node_arg(node, 2))
        if self.is_wide(node):
            raise NotOnline("a row value is read off a vocabulary-sized one in a way that is not known")
        args, kwargs = map_args(node, self.in_finish)
        return _call(self.finish, node.target, *args, **kwargs)

    def _softmax(self, z: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        kind = self._softmaxes[z]
        m = self._keep(kind, self.in_tile(z))
        first = cast(int, m.args[1])
        more = [self.finish.call_function(operator.getitem, (self.finish_in["statistics"], first + i)) for i in (1, 2)]
        return m, more[0], more[1] if kind == "softmax_weighted" else None

    def _keep(self, kind: str, node: fx.Node) -> fx.Node:
        """The (first) statistic of a tile's result, in the finish."""
        from .online import STATISTICS

        key = (kind, node)
        if key not in self._kept:
            at = sum(STATISTICS[k] for k, _ in self.results)
            self.results.append(key)
            self._kept[key] = self.finish.call_function(operator.getitem, (self.finish_in["statistics"], at))
        return self._kept[key]

    def _pick(self, x: fx.Node, label: fx.Node) -> fx.Node:
        """``gather(x, 1, label)`` without x."""
        if label.meta["columns"] != 1:
            raise NotOnline("several elements of a row are gathered")
        if not self.is_wide(x):
            return self.in_finish(x)
        if is_pointwise(x.target):
            args, kwargs = map_args(x, lambda a: self._pick(a, label))
            return _call(self.finish, x.target, *args, **kwargs)
        return self._pick_in_tile(x, label)

    def _pick_in_tile(self, x: fx.Node, label: fx.Node) -> fx.Node:
        t, dtype = self.tile, x.meta["dtype"]
        if dtype is torch.bool:
            raise NotOnline("an element of a mask is gathered")
        key = ("local", label)
        if key not in self._kept:
            local = t.call_function(aten.sub.Tensor, (self.in_tile(label), self.tile_in["start"]))
            last = t.call_function(operator.sub, (self.tile_in["columns"], 1))
            inside = t.call_function(aten.clamp.default, (local, 0, last))
            self._kept[key] = inside
            hit = t.call_function(aten.eq.Tensor, (local, inside))
            self._kept[("hit", label)] = hit
            count = t.call_function(prims.convert_element_type.default, (hit, torch.float32))
            count.meta["dtype"] = torch.float32
            self._keep("hit", count)
        element = t.call_function(aten.gather.default, (self._dense(x), 1, self._kept[key]))
        zero = t.call_function(aten.full.default, ([1, 1], 0), {"dtype": dtype, "device": self._device()})
        picked = t.call_function(aten.where.self, (self._kept[("hit", label)], element, zero))
        picked.meta["dtype"] = dtype
        return self._keep("pick", picked)

    def _dense(self, x: fx.Node) -> fx.Node:
        return self.tile.call_function(
            aten.expand.default, (self.in_tile(x), [self.tile_in["n"], self.tile_in["columns"]])
        )

    def _device(self) -> torch.device:
        return value(next(iter(self.draft.row_inputs)).node).device


def _call(graph: fx.Graph, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
    return graph.call_function(target, args, kwargs)


def _marked(node: fx.Node) -> tuple[fx.Node, str, int]:
    """Logits, pattern and spelling of a recognised value."""
    return cast("tuple[fx.Node, str, int]", node.args)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
