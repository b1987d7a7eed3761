"""Who needs a gradient, how often, of what strides, and inside which autograd context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import harness

N, H, V = 13, 8, 37
CHUNK_BYTES = 5 * V * 4


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.linear(hidden, weight).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def arguments(dtype: torch.dtype = torch.float32, hidden: bool = True, weight: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(N, H, generator=generator).to(dtype).requires_grad_(hidden)
    w = (torch.randn(V, H, generator=generator) * 0.5).to(dtype).requires_grad_(weight)
    return h, w, torch.randint(0, V, (N,), generator=generator)


def compiled(function: Callable[..., Any] = log_probs, **more: Any) -> Callable[..., Any]:
    return harness.compiled(function, CHUNK_BYTES, **more)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_gradcheck(bias: bool) -> None:
    rows, features, words = 5, 3, 7  # a perturbed run for each input element
    generator = torch.Generator().manual_seed(1)
    h, w, b = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((rows, features), (words, features), (words,))
    )
    y = torch.randint(0, words, (rows,), generator=generator)

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(h, w, b if bias else None) / 0.8
        lp = logits.log_softmax(-1)
        return lp.gather(-1, y.unsqueeze(-1)).squeeze(-1), -(lp.exp() * lp).sum(-1)

    facts = harness.Graphs(frozenset({words}), frozenset({features}))
    call = harness.compiled(function, 2 * words * 8)
    with harness.recording(facts):
        assert torch.autograd.gradcheck(call, (h, w, b.requires_grad_(bias)))
    harness.assert_streamed(facts)


def test_double_backward_says_that_it_is_not_supported() -> None:
    h, w, y = arguments()
    (gradient,) = torch.autograd.grad(compiled()(h, w, y).square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(gradient.square().sum(), (h, w))


def test_retained_graph_gives_the_same_gradient_again() -> None:
    h, w, y = arguments()
    out = compiled()(h, w, y)
    weights = torch.linspace(-1, 2, N)
    first = torch.autograd.grad((out * weights).sum(), (h, w), retain_graph=True)
    other = torch.autograd.grad((out * -2 * weights).sum(), (h, w), retain_graph=True)
    again = torch.autograd.grad((out * weights).sum(), (h, w))
    for a, b, c in zip(first, other, again, strict=True):
        assert torch.equal(a, c)
        assert torch.allclose(b, -2 * a, rtol=1e-5, atol=1e-6)


def test_gradients_accumulate_over_calls() -> None:
    h, w, y = arguments()
    call = compiled()
    for _ in range(3):
        call(h, w, y).sum().backward()
    once = torch.autograd.grad(log_probs(h, w, y).sum(), (h, w))
    assert h.grad is not None and w.grad is not None
    assert torch.allclose(h.grad, 3 * once[0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(w.grad, 3 * once[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [False, True], ids=["frozen_hidden", "hidden"])
@pytest.mark.parametrize("weight", [False, True], ids=["frozen_head", "head"])
def test_only_the_gradients_asked_for(hidden: bool, weight: bool) -> None:
    args = arguments(hidden=hidden, weight=weight)
    facts = harness.check(log_probs, args)
    # One matmul forward; the backward recomputes it once and adds one for each gradient.
    expected = 1 + (1 + hidden + weight if hidden or weight else 0)
    assert facts.matmuls <= expected, f"{facts.matmuls} matmuls where {expected} do"


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "expanded": lambda out: (out.unsqueeze(1).expand(-1, 4)).mean(),
    "every_second": lambda out: (out[::2] * 3).sum(),
    "flipped": lambda out: (out.flip(0) * torch.arange(N)).sum(),
    "mixed_sign": lambda out: (out * torch.linspace(-1, 1, N)).sum(),
    "zero": lambda out: (out * 0).sum(),
    "huge": lambda out: (out * 1e30).sum(),
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_gradients(name: str) -> None:
    def step(call: Callable[..., Tensor], wide: bool = False) -> harness.Run:
        h, w, y = harness.fresh(arguments(), wide)
        loss = UPSTREAM[name](call(h, w, y))
        loss.backward()
        return harness.Run([loss], [h.grad, w.grad])

    found = harness.problems(step(compiled()), step(log_probs), step(log_probs, True), harness.floor(arguments()))
    assert not found, found


@pytest.mark.parametrize("layout", ["transposed", "channels", "offset"])
def test_two_dimensional_outputs_with_odd_gradient_strides(layout: str) -> None:
    def step(call: Callable[..., Tensor], wide: bool = False) -> harness.Run:
        h, w, y = harness.fresh((arguments()[0][:12].detach().view(3, 4, H).requires_grad_(), *arguments()[1:]), wide)
        out = call(h, w, y[:12].view(3, 4))
        gradient = {
            "transposed": torch.arange(12.0).view(4, 3).t(),
            "channels": torch.arange(24.0).view(3, 4, 2)[..., 0],
            "offset": torch.arange(20.0)[3:15].view(3, 4),
        }[layout]
        out.backward(gradient.to(out.dtype))
        return harness.Run([out], [h.grad, w.grad])

    found = harness.problems(step(compiled()), step(log_probs), step(log_probs, True), harness.floor(arguments()))
    assert not found, found


def test_checkpoint_around_the_compiled_function() -> None:
    call = compiled()

    def around(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return checkpoint(call, torch.tanh(h), w, y, use_reentrant=False)

    def plain(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return log_probs(torch.tanh(h), w, y)

    args = arguments()
    eager, truth = harness.run(plain, args), harness.run(plain, args, wide=True)
    assert not harness.problems(harness.run(around, args), eager, truth, harness.floor(args))


def test_checkpoint_inside_the_compiled_function() -> None:
    def inside(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return checkpoint(log_probs, torch.tanh(h), w, y, use_reentrant=False) * 2

    harness.check(inside, arguments())


def test_tied_embedding_gets_both_contributions() -> None:
    def tied(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return log_probs(h + F.embedding(y, w), w, y)

    harness.check(tied, arguments())


def test_low_rank_update_of_a_frozen_head() -> None:
    h, w, y = arguments(weight=False)
    a, b = torch.randn(3, H).requires_grad_(), torch.randn(V, 3).requires_grad_()

    def adapted(h: Tensor, w: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(h, w) + 0.5 * F.linear(F.linear(h, a), b)
        return logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    harness.check(adapted, (h, w, a, b, y), facts=harness.Graphs(frozenset({V}), frozenset({H, 3})))


def test_hooks_see_the_gradients() -> None:
    seen: dict[str, list[Tensor]] = {"eager": [], "ours": []}
    for name, call in (("eager", log_probs), ("ours", compiled())):
        h, w, y = harness.fresh(arguments())
        h.register_hook(seen[name].append)
        w.register_hook(lambda gradient: gradient * 2)
        w.register_post_accumulate_grad_hook(lambda leaf, name=name: seen[name].append(leaf.grad.clone()))
        call(h, w, y).sum().backward()
    assert len(seen["ours"]) == len(seen["eager"]) == 2
    for mine, theirs in zip(seen["ours"], seen["eager"], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any]) -> None:
    args = arguments()
    expected = log_probs(*args)
    facts = harness.graph_facts(args)
    with harness.recording(facts), context():
        out = compiled()(*args)
    assert not out.requires_grad
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    harness.assert_streamed(facts)
    assert facts.matmuls == 1


def test_policy_step_after_a_reference_step() -> None:
    """The same compiled function without and with gradients, in turn."""
    call, args = compiled(), arguments()
    truth = harness.run(log_probs, args, wide=True)
    eager = harness.run(log_probs, args)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(call(*args), eager.outputs[0], rtol=1e-5, atol=1e-5)
        assert not harness.problems(harness.run(call, args), eager, truth, harness.floor(args))


def test_inputs_are_left_alone() -> None:
    args = arguments()
    copies = [arg.detach().clone() for arg in args]
    versions = [arg._version for arg in args]
    compiled()(*args).sum().backward()
    assert all(torch.equal(arg, copy) for arg, copy in zip(args, copies, strict=True))
    assert [arg._version for arg in args] == versions


def test_an_optimizer_step_between_forward_and_backward_is_an_error_as_in_eager() -> None:
    for call in (log_probs, compiled()):
        h, w, y = arguments()
        loss = call(torch.tanh(h), w, y).sum()
        with torch.no_grad():
            w.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
