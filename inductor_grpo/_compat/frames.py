"""The frame whose graph Dynamo hands to the backend: its inputs, its symbols, what the trace assumed about them."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch._dynamo.config
from torch._guards import CompileContext, TracingContext

from inductor_grpo._compat import fxgraph

STATE = "_inductor_grpo_state"
"""The attribute of Dynamo's compile context that holds the traces of one compilation (:mod:`.retrace`)."""

NOTE = "_inductor_grpo_note"
"""The attribute of it that holds what was found before the first trace (:mod:`.first_trace`)."""

_USER_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_strict_unbacked_indices",
    "_dynamo_static_indices",
)


@dataclasses.dataclass(eq=False)
class Input:
    """A value that the trace guards on or takes as a graph input: its source, its value in this call.

    ``node`` is its placeholder where it is one.  A float or an int with a placeholder is symbolic already.
    """

    name: str
    value: Any
    node: torch.fx.Node | None
    of_module: bool


@dataclasses.dataclass(frozen=True)
class _Size:
    """A size of the call and the expression that the trace has for it; ``dim`` is None for strides and ints."""

    name: str
    dim: int | None
    expr: Any
    value: int


@dataclasses.dataclass(frozen=True)
class Broken:
    """What a trace assumed and this call does not fulfil; ``ones``: dimensions of 1 that it took to be larger."""

    reason: str
    ones: frozenset[tuple[str, int | None]]


class Frame:
    """The trace that is calling the backend."""

    def __init__(self, tx: Any, context: Any, gm: torch.fx.GraphModule) -> None:
        self.output = tx.output
        self.root = tx.output.root_tx
        self.context = context
        self.gm = gm

    @property
    def state(self) -> Any:
        """The state of the step that led to this trace; None in the first trace of a compilation."""
        attempts = getattr(self.context, STATE, None)
        return attempts.step.state if attempts is not None else None

    @property
    def note(self) -> Any:
        """What was found before the first trace of this compilation; None when nobody asked."""
        return getattr(self.context, NOTE, None)

    @property
    def codes(self) -> frozenset[tuple[str, int, str]]:
        """The functions that the trace has gone through: file, first line, name."""
        return frozenset(map(code_name, self.output.traced_code))

    @property
    def has_generators(self) -> bool:
        """Whether the trace has gone through a generator: Dynamo cannot trace it a second time."""
        inner = (k for c in self.output.traced_code for k in (c, *c.co_consts) if isinstance(k, types.CodeType))
        return any(code.co_flags & inspect.CO_GENERATOR for code in inner)

    @property
    def static(self) -> bool:
        """``torch.compile(dynamic=False)``, or settings to that effect."""
        return static()

    @property
    def code(self) -> tuple[str, int, str]:
        """The function that is compiled: file, first line, name."""
        return code_name(self.root.f_code)

    @property
    def end(self) -> tuple[Any, ...]:
        """Where and why the graph ends: equal for two traces that broke the frame alike."""
        reason = getattr(self.gm, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return ()
        return tuple((entry.filename, entry.lineno) for entry in reason.user_stack)

    def inputs(self) -> list[Input]:
        """Tensors, ints and floats among the frame's locals and what they hold; a tensor may be no graph input."""
        nodes: dict[str, torch.fx.Node] = {}
        sources: dict[str, Any] = {}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            argument = node.meta.get("grapharg")
            if argument is not None and argument.source is not None:
                name = _name(argument.source)
                nodes[name], sources[name] = node, argument.source
        for guard in TracingContext.get().guards_context.dynamo_guards:
            if guard.create_fn_name() in ("TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH"):
                sources.setdefault(_name(guard.originating_source), guard.originating_source)
        found = []
        for name, source in sources.items():
            value = self._value(name)
            if isinstance(value, torch.Tensor) or type(value) in (int, float):
                found.append(Input(name, value, nodes.get(name), _of_module(source)))
        return found

    def _value(self, name: str) -> Any:
        if not name.startswith("L["):
            return None
        try:
            return eval(name, {"G": self.root.f_globals, "L": self.root.f_locals})
        except Exception:  # what else a source can spell is no input of ours
            return None

    def settle(self) -> Broken | None:
        """Makes guards of what this trace assumed about unbacked inputs; what does not hold in this call, or None.

        Dynamo turns an equation between unbacked sizes into a run-time assertion, which would be an error in a call
        where stock compiles again: a size of 1 that is broadcast later on.
        """
        env = self.output.shape_env
        values: dict[sympy.Symbol, int] = {}
        for size in self._sizes():
            if isinstance(size.expr, sympy.Symbol):
                values.setdefault(size.expr, size.value)
            if size.expr.free_symbols <= values.keys() and size.expr.xreplace(values) != size.value:
                same = [other for other in self._sizes() if other.expr == size.expr and other.dim is not None]
                ones = frozenset((other.name, other.dim) for other in same if other.value == 1)
                return Broken(f"a size of {size.name} is {size.value}, and the trace makes it {size.expr}", ones)
        fxgraph.remember_sizes(env, values)
        self._unite_lengths(values)
        known = set(map(str, env.guards))
        for assertion in fxgraph.assertions(env):
            expr = env.simplify(assertion)
            if not expr.free_symbols or not expr.free_symbols <= values.keys():
                continue
            if expr.xreplace(values) == sympy.false:
                return Broken(f"{expr} does not hold in this call", frozenset())
            guard = _shape_guard(expr)
            if guard is not None and str(guard) not in known:
                env.guards.append(guard)
        return None

    def _unite_lengths(self, values: dict[sympy.Symbol, int]) -> None:
        """Makes one size of two where one may be no longer than the other, as labels and logits, and both are equal in
        this call: for a loss it matters that it sees all rows.  That becomes a guard like any equation of sizes."""
        env = self.output.shape_env
        lengths = {size.expr for size in self._sizes() if size.dim is not None} & values.keys()
        for assertion in fxgraph.assertions(env):
            expr = env.simplify(assertion)
            sizes = {expr.lhs, expr.rhs} if isinstance(expr, (sympy.Le, sympy.Ge)) else set()
            if len(sizes) == 2 and sizes <= lengths and len({values[size] for size in sizes}) == 1:
                env.guard_or_defer_runtime_assert(sympy.Eq(expr.lhs, expr.rhs), "equal in the call compiled for")

    def _sizes(self) -> Iterator[_Size]:
        """Sizes and strides of the tensors, and the ints, with what the trace makes of them."""
        for tracked in self.output.tracked_fakes:
            name, fake = _name(tracked.source), tracked.fake
            value = self._value(name)
            if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor):
                for dim, (size, actual) in enumerate(zip(fake.shape, value.shape)):
                    yield _Size(name, dim, sympy.sympify(_expr(size)), actual)
                for size, actual in zip(fake.stride(), value.stride()):
                    yield _Size(name, None, sympy.sympify(_expr(size)), actual)
            elif isinstance(fake, torch.SymInt) and type(value) is int:
                yield _Size(name, None, _expr(fake), value)

    def float_symbols(self) -> dict[str, str]:
        """The symbolic floats: the name of the source, the name of the symbol, which is the same in every trace."""
        found = {}
        for tracked in self.output.tracked_fakes:
            if isinstance(tracked.fake, torch.SymFloat) and isinstance(tracked.fake.node._expr, sympy.Symbol):
                found[_name(tracked.source)] = tracked.fake.node._expr.name
        return found

    def decisions(self) -> tuple[int, frozenset[str]]:
        """How far the values of symbols have decided anything: for :meth:`floats_decided_since`."""
        numbers = [
            tracked.fake.node._expr.name
            for tracked in self.output.tracked_fakes
            if isinstance(tracked.fake, torch.SymFloat) and not tracked.fake.node.expr.free_symbols
        ]
        return len(self.output.shape_env.guards), frozenset(numbers)

    def floats_decided_since(self, decisions: tuple[int, frozenset[str]]) -> frozenset[str]:
        """Symbols of floats that have become numbers since, or that new guards depend on."""
        guards, numbers = decisions
        decided = [guard.expr for guard in self.output.shape_env.guards[guards:]]
        symbols = {s.name for expr in decided for s in expr.free_symbols} & set(self.float_symbols().values())
        return frozenset(symbols | (self.decisions()[1] - numbers))

    def constant_ints(self, names: frozenset[str]) -> frozenset[str]:
        """Those of ``names`` that this trace burnt in although they were marked."""
        symbolic = {
            _name(tracked.source)
            for tracked in self.output.tracked_fakes
            if isinstance(tracked.fake, torch.SymInt) and tracked.fake.node.expr.free_symbols
        }
        return names - symbolic


def code_name(code: types.CodeType) -> tuple[str, int, str]:
    """File, first line and name of a function."""
    return code.co_filename, code.co_firstlineno, code.co_name


def static() -> bool:
    """``torch.compile(dynamic=False)``, or settings to that effect."""
    settings = torch._dynamo.config
    return not settings.automatic_dynamic_shapes and settings.assume_static_by_default


def static_by_default() -> bool:
    """Whether an input is a symbol only where Dynamo has seen it change, or by marks; not so under ``dynamic=True``."""
    return bool(torch._dynamo.config.assume_static_by_default)


def shape_settings() -> tuple[object, ...]:
    """Dynamo's settings that say which inputs are symbols without anybody's marks."""
    names = ("automatic_dynamic_shapes", "assume_static_by_default", "specialize_int", "specialize_float")
    return tuple(getattr(torch._dynamo.config, name, None) for name in names)


def current(gm: Any) -> Frame | None:
    """The frame whose graph ``gm`` is; None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    context = CompileContext.try_get()
    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    if context is None or tx is None or TracingContext.try_get() is None or not isinstance(gm, torch.fx.GraphModule):
        return None
    return Frame(tx, context, gm)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same expression; adds no guard."""
    return _expr(a) == _expr(b)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether the user marked dimensions of the tensor as dynamic or static."""
    return any(hasattr(tensor, name) for name in _USER_MARKS)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _name(source: Any) -> str:
    return source.name if isinstance(source.name, str) else source.name()


def _of_module(source: Any) -> bool:
    kind = source.guard_source
    kind = kind() if callable(kind) else kind
    return any(getattr(kind, f"is_{what}_nn_module", bool)() for what in ("specialized", "unspecialized"))


def _shape_guard(expr: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeGuard, SLoc

    try:
        return ShapeGuard(expr, SLoc("inductor_grpo: assumed by the trace", None), False)
    except TypeError:
        return None


def iterate_graphs(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """The graph and those of its higher-order operators."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield module.graph
