"""Metrics beside the loss that nobody differentiates, though anybody may: the step stays one pass over the logits."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo import by_use, runtime
from tests import harness
from tests.test_all_rows import ALL, args_of
from tests.test_one_pass import DTYPES, V, clipped, inputs, log_probs, schedules

Loss = Callable[..., Any]
Use = Callable[[list[Tensor]], Tensor]


def with_kl(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
    """The policy loss of several frameworks: an approximate KL is returned as it is."""
    difference = log_probs(hidden, weight, labels) - old
    ratio = torch.exp(difference)
    kl = (-difference * mask).sum() / mask.sum()
    fraction = ((ratio > 1.2).float() * mask).sum() / mask.sum()
    return (clipped(ratio, adv) * mask).sum() / mask.sum(), kl, fraction


def with_entropy(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
    """The metric reads all of a row."""
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (clipped(torch.exp(picked - old), adv) * mask).mean(), (entropy * mask).sum() / mask.sum()


def with_tokens(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
    """The log-probs themselves are returned."""
    logp = log_probs(hidden, weight, labels)
    return (clipped(torch.exp(logp - old), adv) * mask).mean(), {"logp": logp, "least": logp.min()}


def of_sequences(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
    """GSPO of padded sequences, with the mean log-prob of each."""
    difference = (log_probs(hidden, weight, labels) - old) * mask
    mean = difference.sum(-1) / mask.sum(-1).clamp(min=1)
    return clipped(torch.exp(mean), adv[:, 0]).mean(), mean


def packed(hidden, weight, labels, old, adv, mask, ids, count):  # type: ignore[no-untyped-def]
    """GSPO of packed sequences, with the mean of its ratios."""
    difference = (log_probs(hidden, weight, labels) - old) * mask
    sums = difference.new_zeros(count).index_add_(0, ids, difference)
    ratio = torch.exp(sums / 9)
    return (clipped(ratio[ids], adv) * mask).sum() / mask.sum(), ratio.mean()


def flat(dtype: torch.dtype = torch.float32) -> list[Any]:
    return list(inputs(dtype, padded=False).values())


def in_sequences(dtype: torch.dtype = torch.float32) -> list[Any]:
    return list(inputs(dtype, padded=True).values())


CASES: dict[str, tuple[Loss, Callable[..., list[Any]], int]] = {
    "kl": (with_kl, flat, 8),
    "entropy": (with_entropy, flat, 8),
    "tokens": (with_tokens, flat, 8),
    "one chunk": (with_kl, flat, ALL),
    "padded": (of_sequences, in_sequences, 16),
    "packed": (packed, args_of, ALL),
}


@pytest.fixture(autouse=True)
def watches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is known of the steps, which is nothing at first."""
    known: dict[str, Any] = collections.defaultdict(by_use._Watch)
    monkeypatch.setattr(by_use, "_watches", known)
    return known


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Products of matrices: those that make logits, and those with their gradient."""
    made: list[str] = []
    mm = torch.mm

    def multiply(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        made.append("logits" if b.shape[1] == V else "gradient")
        return mm(a, b, **more)

    monkeypatch.setattr(runtime.torch, "mm", multiply)
    return made


def steps(name: str, use: Use, dtype: torch.dtype = torch.float32, times: int = 2, **more: Any) -> harness.Graphs:
    """Runs a case several times with the gradients of what ``use`` makes of its outputs; each is held against eager."""
    function, make, rows = CASES[name]
    args = make(dtype)

    def used(call: Loss) -> Loss:
        return lambda *given: use(harness.tensors(call(*given)))

    eager, truth = harness.run(used(function), args), harness.run(used(function), args, wide=True)
    facts = harness.graph_facts(args)
    call = harness.compiled(function, rows * V * args[1].element_size(), **more)
    with harness.recording(facts):
        for _ in range(times):
            ours = harness.run(used(call), args)
            assert not (found := harness.problems(ours, eager, truth, harness.floor(args))), found
    return facts


def the_loss(outputs: list[Tensor]) -> Tensor:
    return outputs[0]


def both(outputs: list[Tensor]) -> Tensor:
    return outputs[0] + 0.3 * outputs[1].sum()


def the_metric(outputs: list[Tensor]) -> Tensor:
    return outputs[1].square().sum()


@pytest.mark.sample(3, only="dynamic")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_loss_alone(name: str, dtype: str, dynamic: bool, watches: dict[str, Any]) -> None:
    facts = steps(name, the_loss, DTYPES[dtype], dynamic=dynamic)
    assert schedules(facts)[0] in ("one-pass, metrics observed", "one-pass, logits kept, metrics observed")
    assert facts.matmuls == 3 and facts.spare_matmuls == 3
    assert len(watches) == 1 and not any(w.differentiated for w in watches.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", [both, the_metric])
@pytest.mark.parametrize("name", CASES)
def test_metrics_are_differentiated(name: str, use: Use, watches: dict[str, Any]) -> None:
    steps(name, use)
    assert len(watches) == 1 and all(w.differentiated for w in watches.values())


def test_the_forward_goes_by_the_last_backward(products: list[str]) -> None:
    """Whoever differentiates two outputs does so in each step: four products then, after one step of six."""
    args = flat()
    call = harness.compiled(with_kl, ALL * V * 4, dynamic=False)
    one, two = ["logits", "gradient", "gradient"], ["logits", "logits", "gradient", "gradient"]
    call(*args)[0].backward()
    for use, expected in (
        (the_loss, one),
        (both, [*one, *one]),
        (both, two),
        (the_loss, two),
        (the_loss, one),
        (the_metric, [*one, *one]),
        (the_metric, two),
    ):
        products.clear()
        use(harness.tensors(call(*args))).backward()
        assert products == expected, use


def test_a_forward_without_a_backward_makes_no_difference(products: list[str]) -> None:
    """Two steps under way at once, of which one is differentiated twice."""
    args = flat()
    truth = torch.autograd.grad(both(harness.tensors(with_kl(*args))), args[:2])
    call = harness.compiled(with_kl, ALL * V * 4, dynamic=False)
    pending = harness.tensors(call(*args))
    both(harness.tensors(call(*args))).backward()
    lean = harness.tensors(call(*args))
    found = []
    for outputs, use in ((lean, both), (pending, both), (harness.tensors(call(*args)), both)):
        args[0].grad = args[1].grad = None
        use(outputs).backward()
        found.append([args[0].grad.clone(), args[1].grad.clone()])
    for hidden, weight in found:
        torch.testing.assert_close(hidden, truth[0])
        torch.testing.assert_close(weight, truth[1])


def test_one_graph_differentiated_several_times() -> None:
    args = flat()
    call = harness.compiled(with_entropy, 8 * V * 4, dynamic=False)
    loss, metric = call(*args)
    eager_loss, eager_metric = with_entropy(*args)
    for weights in ((1.0, 0.0), (-0.5, 0.0), (2.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        ours = torch.autograd.grad(weights[0] * loss + weights[1] * metric, args[:2], retain_graph=True)
        eager = torch.autograd.grad(weights[0] * eager_loss + weights[1] * eager_metric, args[:2], retain_graph=True)
        for a, b in zip(ours, eager):
            torch.testing.assert_close(a, b)
    ours = torch.autograd.grad(metric, args[:2])
    for a, b in zip(ours, torch.autograd.grad(eager_metric, args[:2])):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use", [the_loss, both])
def test_saved_tensors_that_move(use: Use) -> None:
    """A hook that packs what is saved for the backward moves the gradients and the flag too."""
    args = flat()
    call = harness.compiled(with_kl, 8 * V * 4, dynamic=False)
    eager = torch.autograd.grad(use(harness.tensors(with_kl(*args))), args[:2])
    for _ in range(2):
        args[0].grad = args[1].grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            outputs = harness.tensors(call(*args))
        use(outputs).backward()
        torch.testing.assert_close(args[0].grad, eager[0])
        torch.testing.assert_close(args[1].grad, eager[1])


def test_a_metric_without_a_gradient_that_is_finite() -> None:
    """What nobody differentiates adds nothing, whatever its derivative: as in eager, and not 0 * inf."""

    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = log_probs(hidden, weight, labels)
        return (logp * adv).mean(), (logp - logp.detach()).sqrt().sum()

    args = flat()
    harness.compiled(function, 8 * V * 4, dynamic=False)(*args)[0].backward()
    assert args[0].grad.isfinite().all() and args[1].grad.isfinite().all()


def test_what_comes_first_is_not_the_loss(products: list[str]) -> None:
    """The schedule suits the one that is differentiated from the second step on."""

    def function(*args):  # type: ignore[no-untyped-def]
        loss, kl, _ = with_kl(*args)
        return kl, loss

    args = flat()
    call = harness.compiled(function, ALL * V * 4, dynamic=False)
    call(*args)[1].backward()
    for expected in (4, 4):
        products.clear()
        call(*args)[1].backward()
        assert len(products) == expected


def in_pieces(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
    """A loop over chunks of rows."""
    parts = zip(*(x.chunk(3) for x in (hidden, labels, old, adv, mask)))
    found = [with_kl(h, weight, *rest) for h, *rest in parts]
    return sum(f[0] for f in found), sum(f[1] for f in found)


def of_two_heads(hidden, weight, labels, old, adv, mask, other):  # type: ignore[no-untyped-def]
    """The metric alone reads the second head."""
    logp, second = log_probs(hidden, weight, labels), log_probs(hidden, other, labels)
    return (clipped(torch.exp(logp - old), adv) * mask).mean(), (second * mask).mean() + logp.mean()


def test_loops_and_second_heads() -> None:
    args = flat()
    facts = harness.check(in_pieces, args, rows=8)
    assert facts.matmuls in (3, 4), schedules(facts)
    other = torch.randn_like(args[1]).requires_grad_()
    harness.check(of_two_heads, [*args, other], rows=8)
    call = harness.compiled(of_two_heads, 8 * V * 4, dynamic=False)
    call(*args, other)[0].backward()
    (eager,) = torch.autograd.grad(of_two_heads(*args, other)[0], args[1:2])
    torch.testing.assert_close(args[1].grad, eager)


def test_through_inductor() -> None:
    """Code is generated for all of it, and loaded from the caches."""
    for _ in range(2):
        torch.compiler.reset()
        facts = steps("kl", the_loss, codegen="inductor", dynamic=False)
        steps("kl", both, codegen="inductor", dynamic=False)
        assert facts.matmuls == 3


def test_products_that_are_no_gradients_are_always_there() -> None:
    """An expected embedding is a value of the forward, whatever the last backward was asked for."""

    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = F.linear(hidden, weight).log_softmax(-1)
        picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return -(picked * adv).mean(), picked.square().sum(), logp.detach().exp() @ weight.detach()

    args = flat()
    call = harness.compiled(function, 8 * V * 4, dynamic=False)
    for use in (0, 1, 0, 1, 1, 0):
        outputs = call(*args)
        torch.testing.assert_close(outputs[2], function(*args)[2])
        outputs[use].backward()


def test_kept_logits_are_for_two_passes() -> None:
    facts = steps("kl", the_loss, keep_bytes=2**20)
    assert facts.matmuls == 3
    steps("kl", both, keep_bytes=2**20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    """The backward waits for the device, in no way that a program which forbids that would trip over."""
    args = [x.cuda() if isinstance(x, Tensor) else x for x in flat()]
    args = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
    call = harness.compiled(with_kl, 8 * V * 4, dynamic=False, codegen="inductor")
    for use in (the_loss, the_loss, both, both, the_loss, the_loss):
        eager = torch.autograd.grad(use(harness.tensors(with_kl(*args))), args[:2])
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = torch.autograd.grad(use(harness.tensors(call(*args))), args[:2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(ours, eager):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("use", [the_loss, both])
def test_in_a_cuda_graph(use: Use) -> None:
    args = [x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in flat()]
    eager = torch.autograd.grad(use(harness.tensors(with_kl(*args))), args[:2])
    settings = harness.options(8 * V * 4, codegen="inductor") | {"triton.cudagraphs": True}
    call = torch.compile(with_kl, backend=harness.backend(), options=settings, dynamic=False)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        ours = torch.autograd.grad(use(harness.tensors(call(*args))), args[:2])
        for a, b in zip(ours, eager):
            torch.testing.assert_close(a.clone(), b, rtol=1e-4, atol=1e-5)
