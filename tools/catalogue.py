"""What the package knows: its patterns and the rules of its engine, with what a run made of them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from inductor_grpo import backend
from inductor_grpo.canonical import target_text
from inductor_grpo.capture import Capture, Trial, capture
from inductor_grpo.explain import fresh_copy
from inductor_grpo.pattern import Pattern, all_patterns
from inductor_grpo.patterns import segment_sums
from inductor_grpo.rules import RULES
from inductor_grpo.seam import NAME as SEAM

ROWS, HIDDEN, VOCABULARY = 7, 16, 41


def trials(captured: Capture) -> dict[str, Trial]:
    """Tries, hits and time of all graphs together."""
    found: dict[str, Trial] = defaultdict(Trial)
    for graph in captured.graphs:
        for name, trial in graph.trials.items():
            total = found[name]
            total.tries += trial.tries
            total.hits += trial.hits
            total.seconds += trial.seconds
    return dict(found)


def heading(captured: Capture) -> str:
    """What the numbers below are of, and why patterns that nobody tried were not."""
    report = captured.report
    count = len(captured.graphs)
    lines = [f"{count} graph{'s' * (count != 1)} compiled: {report.summary()}"]
    tried = trials(captured)
    if not any(name in tried for name in all_patterns()):
        schedules = {rewrite.schedule.partition(",")[0] for rewrite in report.rewrites if rewrite.matmuls}
        if "one-pass" in schedules:
            why = "one pass needs none of them; --set schedule=two-pass tries them"
        elif any(graph.from_cache for graph in captured.graphs):
            why = "the graphs came from Inductor's cache; leave out --cached to see more"
        else:
            why = "no region came so far; inductor-grpo explain says why"
        lines.append(f"No pattern was tried: {why}.")
    return "\n".join(lines) + "\n"


def as_text(found: dict[str, Trial] | None = None) -> str:
    """The catalogue; with ``found``, how often each entry was tried and used."""
    lines = ["Patterns"]
    for pattern in all_patterns().values():
        lines.append(f"  {pattern.name}: {pattern.summary}{_numbers(found, pattern.name, timed=True)}")
        lines += [f"      takes   {example.__name__}: {_first(example)}" for example in pattern.examples]
        lines += [f"      leaves  {m.function.__name__}: {m.why}" for m in pattern.near_misses]
        lines += [f"      hint    {hint}" for hint in pattern.hints]
    lines += ["", "Seams"]
    lines.append(f"  {SEAM}: {_first(segment_sums)}{_numbers(found, SEAM, timed=True)}")
    lines += [f"      takes   {example.__name__}: {_first(example)}" for example in segment_sums.EXAMPLES]
    lines += [f"      leaves  {m.__name__}: {_first(m).removeprefix('Near miss: ')}" for m in segment_sums.NEAR_MISSES]
    lines += [f"      hint    {hint}" for hint in segment_sums.HINTS]
    lines += ["", "Row rules of the engine (every pointwise operation has one, too)"]
    by_class: dict[str, list[str]] = defaultdict(list)
    documents: dict[str, str] = {}
    for target, rule in RULES.items():
        name = type(rule).__name__
        by_class[name].append(_target(target))
        documents[name] = _first(type(rule))
    for name in sorted(by_class):
        lines.append(f"  {name}: {documents[name]}{_numbers(found, name)}")
        lines += _wrapped(sorted(by_class[name]))
    return "\n".join(lines) + "\n"


def _numbers(found: dict[str, Trial] | None, name: str, timed: bool = False) -> str:
    if found is None:
        return ""
    trial = found.get(name, Trial())
    time = f", {1000 * trial.seconds:.1f} ms" if timed else ""
    return f" [{trial.hits} of {trial.tries} tries{time}]" if timed else f" [used {trial.hits} times]"


def _first(of: Any) -> str:
    return (of.__doc__ or "").strip().partition("\n")[0]


def _target(target: Any) -> str:
    return target_text(torch.fx.Graph().call_function(target))


def _wrapped(names: list[str], width: int = 100) -> list[str]:
    lines: list[str] = []
    line = "     "
    for name in names:
        if len(line) + len(name) > width:
            lines, line = [*lines, line], "     "
        line += f" {name}"
    return [*lines, line]


# --check ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Check:
    """One example or near miss, and whether the pattern did with it what it should."""

    pattern: str
    function: str
    takes: bool
    should: bool
    why: str = ""

    @property
    def ok(self) -> bool:
        """An example is taken, a near miss is not."""
        return self.takes == self.should

    def __str__(self) -> str:
        verb = "takes" if self.should else "leaves"
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.pattern} {verb} {self.function}"


def check(names: list[str] | None = None) -> tuple[list[Check], dict[str, Trial]]:
    """Runs the examples and near misses of the patterns (all of them, or those named) on small inputs."""
    chosen = [p for p in all_patterns().values() if not names or p.name in names]
    checks = []
    with capture(codegen="eager") as captured:
        for pattern in chosen:
            checks += [_check(pattern, example, True) for example in pattern.examples]
            checks += [_check(pattern, m.function, False) for m in pattern.near_misses]
        if not names or SEAM in names:
            checks += [_check_seam(example, True) for example in segment_sums.EXAMPLES]
            checks += [_check_seam(m, False) for m in segment_sums.NEAR_MISSES]
    return checks, trials(captured)


def _check(pattern: Pattern, function: Callable[..., Any], should: bool) -> Check:
    """Hidden, weight and labels into a pattern's function."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return Check(pattern.name, function.__name__, pattern.name in _taken(function, hidden, weight, labels), should)


def _check_seam(function: Callable[..., Any], should: bool) -> Check:
    """Log-probs of tokens, their advantages and their segments into a function of a seam."""
    generator = torch.Generator().manual_seed(0)
    new, old, adv = torch.randn(3, ROWS, generator=generator)
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    return Check(SEAM, function.__name__, SEAM in _taken(function, new.requires_grad_(), old, adv, ids, 3), should)


def _taken(function: Callable[..., Any], *args: Any) -> set[str]:
    """The names of what took part in the rewrites of a function."""
    options: dict[str, Any] = {"grpo.min_logits_bytes": 0, "grpo.codegen": "eager"}
    with backend.collected() as reports:
        torch.compile(fresh_copy(function), backend=backend.inductor_grpo, options=options)(*args)
    return {name for report in reports for r in report.rewrites for name in r.pattern.split("+")}
