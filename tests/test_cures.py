"""Each fault names the user's line and a cure, and the cure, applied to the same function, makes it rewrite."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_grpo
from inductor_grpo.explain import fresh_copy
from tests import harness
from tests.corpus.spellings import ids, normal

N, H, V = 24, 16, 101
AT = "# at fault"
Function = Callable[..., Any]


def pick(values: Tensor, y: Tensor) -> Tensor:
    return values.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def arguments(*more: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        first = normal(N, H, seed=1, grad=True), normal(V, H, seed=2, scale=0.4, grad=True), ids(N, high=V)
        return (*first, *(one() for one in more))

    return make


ARGUMENTS = arguments()


@dataclasses.dataclass(frozen=True)
class Pair:
    """``fault(*make())`` is left alone with ``code`` at the line marked ``# at fault``, and the report's advice holds
    the words ``says``; ``cured(*make_cured())`` does what they say, and is rewritten."""

    fault: Function
    cured: Function
    code: str
    says: str
    make: Callable[[], tuple[Any, ...]] = ARGUMENTS
    make_cured: Callable[[], tuple[Any, ...]] | None = None


# ---------------------------------------------------------------- pairs


def logits_returned(h: Tensor, w: Tensor, y: Tensor) -> Any:
    z = F.linear(h, w)  # at fault
    return pick(z.log_softmax(-1), y).mean(), z


def value_returned(h: Tensor, w: Tensor, y: Tensor) -> Any:
    z = F.linear(h, w)
    return pick(z.log_softmax(-1), y).mean(), pick(z, y)


def log_softmax_returned(h: Tensor, w: Tensor, y: Tensor) -> Any:
    logp = F.linear(h, w).log_softmax(-1)  # at fault
    return pick(logp, y).mean(), logp


def log_probs_returned(h: Tensor, w: Tensor, y: Tensor) -> Any:
    logp = F.linear(h, w).log_softmax(-1)
    return pick(logp, y).mean(), pick(logp, y)


def softmax_over_tokens(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logp = F.linear(h, w).log_softmax(0)  # at fault
    return pick(logp, y)


def softmax_over_vocabulary(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logp = F.linear(h, w).log_softmax(-1)
    return pick(logp, y)


def logits_flipped(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w).flip(0)  # at fault
    return pick(z.log_softmax(-1), y)


def hidden_flipped(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h.flip(0), w)
    return pick(z.log_softmax(-1), y)


def summed_over_tokens(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logp = F.linear(h, w).log_softmax(-1)
    return pick(logp.cumsum(0), y)  # at fault


def log_probs_summed(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logp = F.linear(h, w).log_softmax(-1)
    return pick(logp, y).cumsum(0)


def dropout_on_logits(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.dropout(F.linear(h, w), 0.5)  # at fault
    return pick(z.log_softmax(-1), y)


def dropout_on_hidden(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(F.dropout(h, 0.5), w)
    return pick(z.log_softmax(-1), y)


def noise_drawn(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w)
    z = z + torch.randn_like(z)  # at fault
    return pick(z.log_softmax(-1), y)


def noise_given(h: Tensor, w: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    z = F.linear(h, w)
    z = z + noise
    return pick(z.log_softmax(-1), y)


def temperature_that_learns(h: Tensor, w: Tensor, y: Tensor, t: Tensor) -> Tensor:
    z = F.linear(h, w) / t  # at fault
    return pick(z.log_softmax(-1), y)


def sorted_logits(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logp = F.linear(h, w).log_softmax(-1)
    return pick(logp.sort(0).values, y)  # at fault


def sorted_log_probs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logp = F.linear(h, w).log_softmax(-1)
    return pick(logp, y).sort(0).values


def merged_with_tokens(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w)
    flat = z.flatten()  # at fault
    return flat.logsumexp(0)


def kept_apart(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w)
    return z.logsumexp(-1).logsumexp(0)


def compared_with_all(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w)
    return (z[None] - z[:, None]).logsumexp(-1).sum()  # at fault


def hidden_compared(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear((h[None] - h[:, None]).flatten(0, 1), w)
    return z.logsumexp(-1).sum()


def loss_of_logits(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)  # at fault


def loss_of_hidden(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), y)


def broken(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w)  # at fault
    print(end="")
    return pick(z.log_softmax(-1), y)


def unbroken(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, w)
    return pick(z.log_softmax(-1), y)


def noise_drawn_beside(h: Tensor, w: Tensor, y: Tensor) -> Any:
    z = F.linear(h, w)
    noise = torch.rand(N, V)  # at fault
    return pick(z.log_softmax(-1), y), noise.sum()


def noise_given_beside(h: Tensor, w: Tensor, y: Tensor, noise: Tensor) -> Any:
    z = F.linear(h, w)
    return pick(z.log_softmax(-1), y), noise.sum()


def noise() -> Tensor:
    return normal(N, V, seed=5)


PAIRS = (
    Pair(logits_returned, value_returned, "LOGITS_RETURNED", "return a value a token"),
    Pair(log_softmax_returned, log_probs_returned, "LOGITS_RETURNED", "the log-prob of its label"),
    Pair(softmax_over_tokens, softmax_over_vocabulary, "MIXES_ROWS", "log_softmax(dim=-1)"),
    Pair(logits_flipped, hidden_flipped, "MIXES_ROWS", "apply flip to the hidden states"),
    Pair(summed_over_tokens, log_probs_summed, "MIXES_ROWS", "apply cumsum to values a token"),
    Pair(dropout_on_logits, dropout_on_hidden, "RANDOM", "apply dropout to the hidden states"),
    Pair(noise_drawn, noise_given, "RANDOM", "pass them in", make_cured=arguments(noise)),
    Pair(
        temperature_that_learns,
        temperature_that_learns,
        "LOGITS_RETURNED",
        "give it one value a token",
        make=arguments(lambda: normal(N, V, seed=3).abs().add(0.5).requires_grad_()),
        make_cured=arguments(lambda: normal(N, 1, seed=3).abs().add(0.5).requires_grad_()),
    ),
    Pair(
        temperature_that_learns,
        temperature_that_learns,
        "LOGITS_RETURNED",
        "detach that input",
        make=arguments(lambda: normal(N, V, seed=3).abs().add(0.5).requires_grad_()),
        make_cured=arguments(lambda: normal(N, V, seed=3).abs().add(0.5)),
    ),
    Pair(sorted_logits, sorted_log_probs, "MIXES_ROWS", "apply sort to values a token"),
    Pair(merged_with_tokens, kept_apart, "LAYOUT", "keep it as a dimension of its own"),
    Pair(compared_with_all, hidden_compared, "MIXES_ROWS", "expand the hidden states"),
    Pair(
        loss_of_logits,
        loss_of_hidden,
        "LOGITS_GIVEN",
        "compile the head together with this loss",
        make=lambda: (normal(N, V, seed=4, grad=True), ids(N, high=V)),
        make_cured=arguments(),
    ),
    Pair(broken, unbroken, "LOGITS_RETURNED", "remove what breaks the graph"),
    Pair(noise_drawn_beside, noise_given_beside, "NO_ROW_RULE", "pass it to the function", make_cured=arguments(noise)),
)


def marked(function: Function) -> int:
    """The line of a function's source that is at fault."""
    lines, first = inspect.getsourcelines(function)
    return next(first + at for at, line in enumerate(lines) if AT in line)


def explained(function: Function, args: tuple[Any, ...]) -> inductor_grpo.Report:
    with inductor_grpo.config.patch(min_logits_bytes=0):
        return inductor_grpo.explain(function, *args)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.fault.__name__}-{pair.cured.__name__}")
def test_pair(pair: Pair) -> None:
    found = [r for r in explained(pair.fault, pair.make()).rejections if r.code == pair.code]
    assert len(found) == 1, found
    rejection = found[0]
    assert rejection.location is not None
    assert (rejection.location.file, rejection.location.line) == (__file__, marked(pair.fault))
    assert rejection.location.user_function == pair.fault.__name__
    assert pair.says in rejection.cure and rejection.why and rejection.bytes > 0
    cured = explained(pair.cured, (pair.make_cured or pair.make)())
    assert len(cured.rewrites) == 1 and not cured.rejections, str(cured)


def test_small_logits_and_the_option_that_is_named() -> None:
    report = inductor_grpo.explain(unbroken, *arguments()())
    assert [r.code for r in report.rejections] == ["TOO_SMALL"]
    assert "lower that setting (0 rewrites every head)" in report.rejections[0].cure
    assert "grpo.min_logits_bytes" in report.rejections[0].why
    assert explained(unbroken, arguments()()).rewrites


def rewrites_by_call(
    function: Function, least: float, chunk: int, heads: int, dynamic: bool | None, *tokens: int
) -> list[list[int]]:
    """For each call the rewrites of each graph that it compiled; ``least`` and ``chunk`` are rows of logits."""
    options = {"grpo.codegen": "eager", "grpo.min_logits_bytes": int(4 * least * V), "grpo.chunk_bytes": 4 * chunk * V}
    found = []
    with inductor_grpo.capture() as captured:
        compiled = torch.compile(fresh_copy(function), backend=harness.backend(), options=options, dynamic=dynamic)
        for n in tokens:
            before = len(captured.graphs)
            compiled(normal(n, H, seed=1), *(normal(V, H, seed=2 + i) for i in range(heads)), ids(n, high=V))
            found.append([len(g.report.rewrites) for g in captured.graphs[before:]])
    return found


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_small_logits_are_left_alone_while_they_are_small(dynamic: bool | None) -> None:
    """Sizes above the limit compile anew, once for all of them, and are rewritten; small ones have theirs again."""
    found = rewrites_by_call(unbroken, 100, 20, 1, dynamic, 10, 20, 30, 200, 300, 11, 400, 21)
    again = dynamic is False
    assert [found[3], found[4], found[6]] == [[1], [1] if again else [], [1] if again else []]
    assert [count for place in (0, 1, 2) for count in found[place]] in ([0], [0, 0], [0, 0, 0])
    assert [found[5], found[7]] == [[0] if again else []] * 2


def divergence(h: Tensor, w: Tensor, other: Tensor, y: Tensor) -> Tensor:
    """Two heads in one region."""
    p, q = F.linear(h, w).log_softmax(-1), F.linear(h, other).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean() + pick(p, y).mean()


@pytest.mark.parametrize("dynamic", [None, True])
def test_two_heads_are_left_alone_while_they_are_small(dynamic: bool | None) -> None:
    """The least size is one for both, and passed where each is below it still; a chunk holds so much of each."""
    found = rewrites_by_call(divergence, 100, 20, 2, dynamic, 20, 30, 49, 70, 90, 300, 21)
    assert {n for counts in found[:3] for n in counts} == {0} and found[3:] == [[1], [], [], []]
    found = rewrites_by_call(divergence, 0.01, 40, 2, dynamic, 31, 33, 50, 70)
    assert {n for counts in found[:2] for n in counts} == {0} and found[2:] == [[1], []]


def test_both_sides_of_a_graph_break_are_named() -> None:
    first, second = explained(broken, arguments()()).rejections
    line = marked(broken) + 1
    assert (first.code, second.code) == ("LOGITS_RETURNED", "LOGITS_GIVEN")
    assert f"test_cures.py:{line}" in first.why and "print" in first.why
    assert f"test_cures.py:{line}" in second.why
    assert second.location is not None and second.location.line == line + 1
    assert second.location.user_function == "broken" and "resume" not in str(second)


def branches(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    count = (y > 2).count_nonzero() or 1
    return pick(F.linear(h, w).log_softmax(-1), y).sum() / count


def test_a_branch_on_a_tensor_has_its_line_and_plain_words() -> None:
    with inductor_grpo.capture(codegen="eager") as found:
        torch.compile(branches, backend=harness.backend())(*arguments()())
    line = inspect.getsourcelines(branches)[1] + 1
    assert found.breaks
    for graph_break in found.breaks:
        assert graph_break.location is not None and graph_break.location.line == line
        assert "branch" in graph_break.reason and "generic_jump" not in graph_break.reason


def without_a_head(h: Tensor) -> Tensor:
    a = h.sin()
    print(end="")
    return a.cos()


def test_no_head_tells_how_many_graphs_and_where_they_break() -> None:
    (rejection,) = explained(without_a_head, (normal(N, H, seed=1),)).rejections
    assert rejection.code == "NO_HEAD"
    assert "Dynamo made 2 graphs" in rejection.why
    assert f"test_cures.py:{inspect.getsourcelines(without_a_head)[1] + 2}" in rejection.why
    assert "fullgraph=True" in rejection.cure


class Model(torch.nn.Module):
    """In the manner of Hugging Face: the head inside, the loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.embed(tokens))
        logits = self.lm_head(hidden)  # at fault
        return {"logits": logits}


def test_model_with_its_loss_outside_and_both_compiled_together() -> None:
    model, tokens = Model(), ids(2, N, high=V)
    (rejection,) = explained(model, (tokens,)).rejections
    assert rejection.code == "LOGITS_RETURNED"
    assert rejection.location is not None and rejection.location.line == marked(Model.forward)
    assert "compile what reads it into the same function" in rejection.cure

    def step(model: Model, tokens: Tensor) -> Tensor:
        logits = model(tokens)["logits"][:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    together = explained(step, (model, tokens))
    assert len(together.rewrites) == 1 and not together.rejections, str(together)


def test_option_without_its_prefix() -> None:
    for name in ("require", "chunk_bytes"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=rf"unknown option '{name}'; did you mean 'grpo\.{name}'\?"):
            compiled = torch.compile(unbroken, backend=harness.backend(), options={name: True})
            compiled(*arguments()())


@pytest.mark.parametrize("label", [V, -V - 1])
@pytest.mark.parametrize("pattern", [True, False], ids=["tiles", "rows"])
def test_label_out_of_range_says_so(label: int, pattern: bool) -> None:
    h, w, y = arguments()()
    y[3] = label
    options = harness.options(0, **({} if pattern else {"disable": "tiles"}))
    with pytest.raises((RuntimeError, IndexError), match=r"out of bounds|out of range"):
        torch.compile(fresh_copy(unbroken), backend=harness.backend(), options=options)(h, w, y)


def test_the_operation_is_named_behind_its_views() -> None:
    def batched(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(h, w)

    (rejection,) = explained(batched, (normal(2, N, H, seed=1), normal(V, H, seed=2))).rejections
    assert (rejection.code, rejection.op) == ("LOGITS_RETURNED", "mm")
