"""What the tests share: the accuracy rule, a compiled run, and what is left in the graphs that later passes see.

The accuracy rule.  The reference is the user's function in eager float64, inputs widened, casts written inside it
widened too.  The yardstick is eager's own error in the dtype of the case.  A tensor of ours is right when

    error(ours) <= 2 * error(eager) + floor(dtype)

where ``error(x) = max|x - reference| / max|reference|`` over the finite elements, the pattern of nan, inf and -inf is
eager's, and ``floor`` is a few units in the last place (``FLOOR``) of the coarsest floating dtype among the inputs and
the tensor itself: eager is exact by luck now and then.  Integer and bool outputs are equal to eager's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from inductor_grpo.tools.accuracy import FLOOR, error, widened

Function = Callable[..., Any]

BACKEND = os.environ.get("GRPO_TEST_BACKEND", "inductor_grpo")  # "inductor": shows which tests depend on a rewrite
NAMESPACE = "inductor_grpo"
ROWS = 5


# ---------------------------------------------------------------- running a function, in eager or compiled


def fresh(value: Any, wide: bool = False) -> Any:
    """Independent leaves with the values, strides and ``requires_grad`` of ``value``; in float64 if ``wide``.

    Tensors of a subclass and on the meta device are passed through, integers stay as they are.
    """

    def one(leaf: Any) -> Any:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.device.type == "meta":
            return leaf
        copy = leaf.detach().clone()
        if copy.stride() != leaf.stride() and 0 not in leaf.stride() and leaf.numel():
            reach = 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
            copy = leaf.new_zeros(reach).as_strided(leaf.shape, leaf.stride()).copy_(leaf.detach())
        if wide and copy.is_floating_point():
            copy = copy.double()
        return copy.requires_grad_(leaf.requires_grad)

    return tree_map(one, value)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def probe(outputs: Any) -> torch.Tensor | None:
    """A weighted sum of the differentiable outputs; a plain sum would hide a kernel that ignores its gradient."""
    total = None
    for index, out in enumerate(tensors(outputs)):
        if not (out.is_floating_point() and out.requires_grad):
            continue
        if out.device.type == "meta":
            term = out.sum()
        else:
            steps = torch.arange(out.numel(), dtype=torch.float64, device=out.device)
            term = (out.to(torch.float64).reshape(-1) * (torch.cos(steps * 0.7 + index) + 0.25)).sum()
        total = term if total is None else total + term
    return total


def run_backward(loss: torch.Tensor) -> None:
    """``loss.backward()`` that leaves :func:`widened` on: a checkpoint recomputes inside it."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@dataclasses.dataclass
class Run:
    """Outputs and the gradients of the arguments (None where there is none), both flat."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    def values(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for index, out in enumerate(self.outputs):
            yield f"output {index}", out.detach()
        for index, gradient in enumerate(self.gradients):
            yield f"gradient {index}", gradient


def run(
    function: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    wide: bool = False,
    backward: bool = True,
) -> Run:
    """Calls ``function`` on fresh arguments and takes gradients of :func:`probe` of what it returns."""
    args, kwargs = fresh(tuple(args), wide), fresh(kwargs or {}, wide)
    with widened() if wide else contextlib.nullcontext():
        outputs = function(*args, **kwargs)
        loss = probe(outputs) if backward else None
        if loss is not None:
            run_backward(loss)
    leaves = tensors((args, kwargs))
    return Run(tensors(outputs), [leaf.grad if leaf.is_leaf else None for leaf in leaves])


def options(chunk_bytes: int, **more: Any) -> dict[str, Any]:
    """Compile options of the tests: every head however small, no code generation."""
    keys = {"codegen": "eager", "min_logits_bytes": 0, "chunk_bytes": chunk_bytes, **more}
    return {f"grpo.{name}": value for name, value in keys.items()}


def compiled(
    function: Function, chunk_bytes: int = 0, *, dynamic: bool | None = False, fullgraph: bool = False, **more: Any
) -> Function:
    """``function`` through the backend; ``chunk_bytes`` bounds one chunk of logits."""
    settings = options(chunk_bytes, **more) if BACKEND == NAMESPACE else None
    return torch.compile(function, backend=backend(), options=settings, dynamic=dynamic, fullgraph=fullgraph)


def backend() -> Any:
    """The backend's name where the package is installed, the function itself in a bare checkout."""
    if BACKEND != NAMESPACE or BACKEND in torch._dynamo.list_backends(exclude_tags=()):
        return BACKEND
    from inductor_grpo.backend import inductor_grpo

    return inductor_grpo


# ---------------------------------------------------------------- the accuracy rule


class ProductsInBlocks(TorchFunctionMode):
    """Eager that takes the products of ``F.linear`` in blocks of rows, as chunks take them.

    A BLAS may round a product of few rows otherwise than one of many.  Where a loss blows that difference up, the
    error of eager's one product is the luck of the draw, and no yardstick for products of other sizes.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear or kwargs:
            return func(*args, **(kwargs or {}))
        hidden, *rest = args
        blocks = [func(block, *rest) for block in hidden.flatten(0, -2).split(self.rows)]
        return torch.cat(blocks).unflatten(0, hidden.shape[:-1])


def kinds(value: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 nan, 2 inf, 3 -inf."""
    return value.isnan() * 1 + value.isposinf() * 2 + value.isneginf() * 3


def floor(args: Any) -> float:
    """The largest ``FLOOR`` among the floating dtypes in ``args``; 0 where there is none."""
    return max((FLOOR[leaf.dtype] for leaf in tensors(args) if leaf.is_floating_point()), default=0.0)


def problems(ours: Run, eager: Run, reference: Run, least: float) -> list[str]:
    """What in ``ours`` breaks the rule; empty when all is well."""
    found = []
    if len(ours.outputs) != len(eager.outputs):
        return [f"{len(ours.outputs)} outputs, eager gives {len(eager.outputs)}"]
    rows = zip(ours.values(), eager.values(), reference.values(), strict=True)
    for (name, got), (_, yardstick), (_, truth) in rows:
        if got is None or yardstick is None:
            if (got is None) != (yardstick is None):
                found.append(f"{name}: {'missing' if got is None else 'not in eager'}")
            continue
        if got.shape != yardstick.shape or got.dtype != yardstick.dtype:
            found.append(f"{name}: {got.dtype}{list(got.shape)}, eager {yardstick.dtype}{list(yardstick.shape)}")
        elif got.device.type == "meta":
            continue
        elif not got.is_floating_point():
            if not torch.equal(got, yardstick):
                found.append(f"{name}: {got.dtype} values differ from eager")
        elif not torch.equal(kinds(got), kinds(yardstick)):
            found.append(f"{name}: non-finite pattern differs from eager")
        else:
            assert truth is not None
            mine, allowed = error(got, truth), error(yardstick, truth)
            bound = 2 * allowed + max(least, floor(got))
            if not mine <= bound:
                found.append(f"{name}: error {mine:.2e}, eager {allowed:.2e}, bound {bound:.2e}")
    return found


# ---------------------------------------------------------------- what is left in the graphs


@dataclasses.dataclass
class Graphs:
    """What a later ``joint_custom_post_pass`` saw, summed over the graphs of a compile."""

    vocabularies: frozenset[int]
    features: frozenset[int]
    tokens: int = 2
    count: int = 0
    regions: int = 0
    matmuls: int = 0
    spare_matmuls: int = 0
    """Of backwards that only run where metrics are differentiated."""
    seam_calls: int = 0
    segment_sums: int = 0
    leftovers: list[str] = dataclasses.field(default_factory=list)
    reports: list[Any] = dataclasses.field(default_factory=list)


def graph_facts(args: Sequence[Any], *, vocabularies: Sequence[int] = (), features: Sequence[int] = ()) -> Graphs:
    """Facts for a call ``function(hidden, weight, ...)``: V and H from the weight ``[V, H]``, unless given."""
    weight = args[1]
    return Graphs(frozenset(vocabularies or (weight.shape[0],)), frozenset(features or (weight.shape[1],)), tokens=2)


def hint(size: Any) -> int:
    """The number behind a size, symbolic or not; 0 where it has none."""
    if isinstance(size, int):
        return size
    value = getattr(size.node, "hint", None)
    return int(value) if isinstance(value, int) else 0


def is_leftover(shape: Sequence[int], facts: Graphs) -> bool:
    """A tensor with a vocabulary dimension and at least ``tokens`` rows, other than one shaped like a weight.

    A weight or its gradient has V and feature sizes only (``[V, H]``, ``[V, rank]``, ``[1, V]``).  A flattened tensor
    counts by the multiple of V; sizes in the tests are primes, so that a multiple is no accident.
    """
    for vocabulary in facts.vocabularies:
        if vocabulary < 3:
            continue
        for position, size in enumerate(shape):
            if size == 0 or size % vocabulary:
                continue
            rest = [other for at, other in enumerate(shape) if at != position]
            if size // vocabulary != 1 and size // vocabulary not in facts.features:
                rest.append(size // vocabulary)
            rows = math.prod(other for other in rest if other not in facts.features)
            if rows >= facts.tokens:
                return True
    return False


class Recorder(CustomGraphPass):
    """A joint pass that changes nothing and writes down regions, matmuls and vocabulary-sized tensors."""

    def __init__(self, facts: Graphs) -> None:
        self.facts = facts

    def uuid(self) -> None:
        """None: what it records must not be skipped by a cache."""
        return None

    def __call__(self, graph: torch.fx.Graph) -> None:
        facts = self.facts
        facts.count += 1
        views: set[torch.fx.Node] = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            target = node.target
            if isinstance(target, torch._ops.OpOverload):
                if target.namespace == NAMESPACE and "segments" in str(target):
                    facts.seam_calls += 1
                    facts.segment_sums += len(segment_program(node).sums)
                    continue
                if target.namespace == NAMESPACE and "rows_unless" in str(target):
                    facts.spare_matmuls += program_matmuls(node)
                    continue
                if target.namespace == NAMESPACE and program_text(node) is not None:
                    facts.regions += 1
                    facts.matmuls += program_matmuls(node)
                    continue
                if target.is_view and node.all_input_nodes and node.all_input_nodes[0] in views:
                    views.add(node)
                    continue
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not node.users:
                continue
            shape = [hint(size) for size in value.shape]
            if is_leftover(shape, facts):
                facts.leftovers.append(f"{node.name} {target} {shape}")


def segment_program(node: torch.fx.Node) -> Any:
    """The program of a call of ``inductor_grpo::segments``."""
    from inductor_grpo.seam.program import SegmentProgram

    return SegmentProgram.from_text(str(node.args[-1]))


def program_text(node: torch.fx.Node) -> str | None:
    """The program that a call of one of our operators runs, if it does."""
    return next((arg for arg in node.args if isinstance(arg, str) and arg.startswith("{")), None)


def program_matmuls(node: torch.fx.Node) -> int:
    """Matmuls of one region: its projections and its contracting sinks."""
    from inductor_grpo.program import Program, TileProgram

    text = program_text(node)
    assert text is not None
    read = TileProgram.from_text if "tiles" in str(node.target) else Program.from_text
    program = read(text)
    projections = 0 if getattr(program, "takes_over", False) else len(program.projections)
    return projections + sum(sink.kind in ("contract", "outer", "outer_t") for sink in program.sinks)


@contextlib.contextmanager
def recording(facts: Graphs) -> Iterator[Graphs]:
    """Records every graph that Inductor's joint passes see in the block, after ours and with caches off."""
    import torch._inductor.config as inductor_config

    patch = inductor_config.patch(joint_custom_post_pass=Recorder(facts), force_disable_caches=True)
    with patch, collecting() as reports:
        yield facts
    facts.reports.extend(reports)


# ---------------------------------------------------------------- one call that checks it all


def check(
    function: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    rewritten: bool = True,
    dynamic: bool | None = False,
    rows: int = ROWS,
    facts: Graphs | None = None,
    reference: tuple[Run, Run] | None = None,
    **more: Any,
) -> Graphs:
    """Runs ``function(hidden, weight, ...)`` compiled, and asserts that it is right by the rule and streamed.

    Chunks are ``rows`` rows, so that small inputs make several of them with a ragged tail.
    """
    facts = facts or graph_facts(args)
    if reference is None:
        reference = run(function, args, kwargs), run(function, args, kwargs, wide=True)
    eager, truth = reference
    width = max(facts.vocabularies)
    call = compiled(function, rows * width * args[1].element_size(), dynamic=dynamic, **more)
    with recording(facts):
        ours = run(call, args, kwargs)
    found = problems(ours, eager, truth, floor((args, kwargs)))
    assert not found, "\n".join(found)
    assert "INTERNAL" not in codes(facts.reports), reasons(facts.reports)
    if rewritten:
        assert_streamed(facts)
    return facts


def assert_streamed(facts: Graphs) -> None:
    """A region was rewritten and reported, and nothing vocabulary-sized is left."""
    why = reasons(facts.reports)
    assert facts.regions, f"no region rewritten in {facts.count} graphs{why}"
    assert not facts.leftovers, "vocabulary-sized tensors left:\n" + "\n".join(facts.leftovers) + why
    assert any(report.rewrites for report in facts.reports), "rewritten, and not reported"


@contextlib.contextmanager
def collecting() -> Iterator[list[Any]]:
    """The reports of the graphs that are compiled in the block; none with a foreign backend."""
    if BACKEND != NAMESPACE:
        yield []
        return
    from inductor_grpo.backend import collected

    with collected() as reports:
        yield reports


def codes(reports: list[Any]) -> list[str]:
    """The codes of all rejections."""
    return [rejection.code for report in reports for rejection in report.rejections]


def reasons(reports: list[Any]) -> str:
    """All rejections as text, for an assertion's message."""
    rejections = [rejection for report in reports for rejection in report.rejections]
    return "".join(f"\n{rejection.code}: {rejection.message} ({rejection.location})" for rejection in rejections)
