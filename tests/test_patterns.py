"""Every pattern takes its examples, leaves its near-misses alone, and agrees with the engine's generic path."""

from __future__ import annotations

import pytest
import torch

from inductor_grpo.online import ADDITIVE, STATISTICS, initial, merge, of_tile
from inductor_grpo.pattern import Pattern, all_patterns
from tests import harness

PATTERNS = list(all_patterns().values())
EXAMPLES = [(p, f) for p in PATTERNS for f in p.examples]
NEAR_MISSES = [(p, m) for p in PATTERNS for m in p.near_misses]
DTYPES = [torch.float32, torch.bfloat16]


def name(value: object) -> str:
    return str(getattr(value, "name", None) or getattr(getattr(value, "function", value), "__name__", value))


def inputs(dtype: torch.dtype, square: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden [2, 7, 16], weight [41, 16], labels; ``square``: as many tokens as words, so that a wrong axis fits
    too."""
    tokens = (1, 41) if square else (2, 7)
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(*tokens, 16, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(41, 16, generator=g) * 0.4).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 41, tokens, generator=g)


def patterns_in(facts: harness.Graphs) -> set[str]:
    """Names of the patterns that the reports name."""
    return {part for report in facts.reports for rewrite in report.rewrites for part in rewrite.pattern.split("+")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("pattern", "example"), EXAMPLES, ids=name)
def test_example(pattern: Pattern, example: object, dtype: torch.dtype) -> None:
    facts = harness.check(example, inputs(dtype))  # type: ignore[arg-type]
    assert pattern.name in patterns_in(facts)


@pytest.mark.parametrize(("pattern", "example"), EXAMPLES, ids=name)
def test_disabled(pattern: Pattern, example: object) -> None:
    """The generic path gives the same example, right too."""
    facts = harness.check(example, inputs(torch.float32), disable=[p.name for p in PATTERNS])  # type: ignore[arg-type]
    assert not patterns_in(facts) & set(all_patterns())


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("pattern", "miss"), NEAR_MISSES, ids=name)
def test_near_miss(pattern: Pattern, miss: object, square: bool) -> None:
    """Values stay right, and the pattern is not what took it."""
    function = miss.function  # type: ignore[attr-defined]
    if square and function.__name__ == "over_rows":
        args = inputs(torch.float32, square)
        hidden = args[0].detach()[0].requires_grad_()
        facts = harness.check(function, (hidden, args[1], args[2][0]), rewritten=False)
    else:
        facts = harness.check(function, inputs(torch.float32, square), rewritten=False)
    assert pattern.name not in patterns_in(facts)


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("case", ["plain", "masked", "all -inf", "inf", "nan", "far below zero", "far apart"])
def test_online_statistics(kind: str, case: str) -> None:
    """Merged over tiles they are what one tile of all columns has."""
    g = torch.Generator().manual_seed(1)
    z = torch.randn(5, 40, generator=g, dtype=torch.float64) * 30
    if case == "masked":
        z[:, 7:31] = -torch.inf
    elif case == "all -inf":
        z[2] = -torch.inf
    elif case in ("inf", "nan"):
        z[1, 17] = float(case)
    elif case == "far below zero":
        z -= 1e5
    elif case == "far apart":
        z[:, :13] -= 1e4
    seen = [torch.full((5, 1), fill, dtype=z.dtype) for fill in initial(kind)]
    for tile in z.split(9, 1):
        seen = merge(kind, seen, of_tile(kind, tile))
    for merged, direct in zip(seen, of_tile(kind, z)):
        if kind == "softmax_weighted" and case in ("masked", "all -inf", "inf", "nan"):
            assert torch.equal(merged.isfinite(), direct.isfinite())
            merged, direct = merged.nan_to_num(0, 0, 0), direct.nan_to_num(0, 0, 0)
        torch.testing.assert_close(merged, direct, rtol=1e-12, atol=1e-9, equal_nan=True)
    assert kind not in ADDITIVE or len(seen) == 1


def test_every_file_of_patterns_is_found() -> None:
    import pathlib

    import inductor_grpo.patterns as package

    files = {p.stem for path in package.__path__ for p in pathlib.Path(path).glob("*.py")} - {"__init__", "naive"}
    assert files == {*all_patterns(), "segment_sums"}  # which is no pattern of logits
