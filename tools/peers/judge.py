"""Runs a case in eager, in float64 and through the backend, and says what became of it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from inductor_grpo import backend
from inductor_grpo.capture import Capture, capture
from inductor_grpo.report import Location
from inductor_grpo.seam import NAME as SEAM
from inductor_grpo.tools import accuracy
from inductor_grpo.tools.peers.case import Case, Made
from inductor_grpo.tools.peers.inputs import VOCABULARY


@dataclasses.dataclass
class Result:
    """One line of the table.

    ``regions``   how each head runs, such as "engine, one-pass, 3 matmuls"
    ``matmuls``   head-sized products of all regions; ``seams`` sums per segment, such as "segment_sums, fused"
    ``ours``, ``eager``  the largest relative error against float64 over outputs and gradients; ``ratio`` the largest
                  quotient of the two over all tensors, with the floor taken off
    ``equal``     every value and gradient is as near to float64 as twice eager's own error and a few ulp
    ``left``      rejections that leave a vocabulary-sized tensor; ``breaks`` the graph breaks: where, why
    ``graphs``    graphs of Dynamo's
    """

    name: str
    package: str
    version: str
    function: str
    how: str
    regions: list[str] = dataclasses.field(default_factory=list)
    matmuls: int = 0
    seams: list[str] = dataclasses.field(default_factory=list)
    ours: float = 0.0
    eager: float = 0.0
    ratio: float = 0.0
    equal: bool = False
    graphs: int = 0
    left: list[str] = dataclasses.field(default_factory=list)
    breaks: list[str] = dataclasses.field(default_factory=list)
    cure: str = ""
    error: str = ""
    stock: str = ""
    """With an error of ours: how stock ``torch.compile`` fails on the same step."""
    seconds: float = 0.0

    @property
    def rewritten(self) -> bool:
        """A region runs streamed, and no vocabulary-sized tensor is left."""
        return bool(self.regions) and not self.left and not self.error


def _leaves(args: Any, wide: bool) -> Any:
    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.detach().clone()
        if wide and copy.is_floating_point():
            copy = copy.double()
        return copy.requires_grad_(value.requires_grad)

    return tree_map(one, args)


def _run(step: Any, args: tuple[Any, ...], wide: bool = False) -> list[torch.Tensor]:
    """The step's tensors, then the gradients of its arguments; the loss is what it returns first."""
    torch.manual_seed(0)  # some losses of packages draw
    args = _leaves(args, wide)
    with accuracy.widened(secretly=True) if wide else contextlib.nullcontext():  # packages assert float32
        values = [value for value in tree_leaves(step(*args)) if isinstance(value, torch.Tensor)]
        torch.autograd.backward(values[0])
    gradients = [arg.grad for arg in tree_leaves(args) if isinstance(arg, torch.Tensor) and arg.grad is not None]
    return [value.detach() for value in values] + gradients


def compare(
    ours: list[torch.Tensor], eager: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype
) -> tuple[bool, float, float, float]:
    """Whether every tensor keeps the rule, the largest error of ours, of eager, and the largest quotient."""
    if not len(ours) == len(eager) == len(truth):
        return False, float("inf"), 0.0, float("inf")
    equal, worst, yard, ratio = True, 0.0, 0.0, 0.0
    for mine, theirs, true in zip(ours, eager, truth):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False, float("inf"), 0.0, float("inf")
        if not mine.is_floating_point():
            equal = equal and torch.equal(mine, theirs)
            continue
        equal = equal and torch.equal(mine.isfinite(), theirs.isfinite()) and torch.equal(mine.isnan(), theirs.isnan())
        a, b = accuracy.error(mine, true), accuracy.error(theirs, true)
        least = max(accuracy.FLOOR[d] for d in (dtype, mine.dtype))
        equal = equal and a <= 2 * b + least
        worst, yard = max(worst, a), max(yard, b)
        ratio = max(ratio, a / max(b, least))
    return equal, worst, yard, ratio


def judge(case: Case, codegen: str = "eager") -> Result:
    """Runs a case whose package is installed; what it raises is in ``error``."""
    result = Result(case.name, case.package, case.version, case.function, case.how, cure=case.cure)
    started = time.perf_counter()
    try:
        made = case.make()
        try:
            captured, ours = _compiled(made, codegen)
        except Exception:
            result.stock = _stock(made)
            raise
        _describe(result, captured)
        with torch.compiler.set_stance("force_eager"):  # packages compile some of their helpers themselves
            eager, truth = _run(*made), _run(*made, wide=True)
        dtype = made[1][0].dtype
        result.equal, result.ours, result.eager, result.ratio = compare(ours, eager, truth, dtype)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        result.error = f"{type(error).__name__}: {_first_line(error)} ({frame.name})"
    result.seconds = time.perf_counter() - started
    return result


def _first_line(error: BaseException) -> str:
    """What the innermost error says."""
    inner = getattr(error, "inner_exception", None) or error
    return str(inner).strip().splitlines()[0] if str(inner).strip() else ""


def _stock(made: Made) -> str:
    """How stock ``torch.compile`` ends for a step at which ours ended with an error; empty when it works."""
    torch._dynamo.reset()
    try:
        _run(torch.compile(made[0]), made[1])
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _compiled(made: Made, codegen: str) -> tuple[Capture, list[torch.Tensor]]:
    """The step through the backend, with chunks of eight rows: a sequence fits, and there are several."""
    step, args = made
    torch._dynamo.reset()
    options: dict[str, Any] = {
        "grpo.min_logits_bytes": 0,
        "grpo.chunk_bytes": 8 * VOCABULARY * args[1].element_size(),
    }
    call = torch.compile(step, backend=backend.inductor_grpo, options=options)
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=getattr(step, "one_graph", False))
    with scalars, capture(fresh=True, codegen=codegen) as captured:
        return captured, _run(call, args)


def _describe(result: Result, captured: Capture) -> None:
    report = captured.report
    result.graphs = len(captured.graphs)
    for rewrite in report.rewrites:
        if rewrite.pattern == SEAM:
            result.seams.append(rewrite.schedule)
        else:
            result.regions.append(f"{rewrite.pattern}, {rewrite.schedule}")
            result.matmuls += rewrite.matmuls
    result.left = [f"{r.code} at {_place(r.location)}: {r.message}" for r in report.obstacles]
    result.breaks = [f"{_place(b.location)} ({b.reason})" for b in captured.breaks]


def _place(location: Location | None) -> str:
    return "an unknown line" if location is None else str(location)
