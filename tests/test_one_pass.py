"""The one-pass schedule: where it applies it takes three matmuls and is right; where it does not, two passes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo import body, live_rows, runtime
from inductor_grpo.packing import Packing
from tests import harness
from tests.corpus.variants import VARIANTS

B, T, H, V = 3, 7, 8, 37
N = B * T
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def rows_are_worth_leaving_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight columns of hidden they are not; all tests of this file run with it."""
    monkeypatch.setitem(live_rows.MOVE_COST, "cpu", 0.5)


def inputs(dtype: torch.dtype = torch.float32, padded: bool = True) -> dict[str, Tensor]:
    """A batch of sequences ``[B, T]`` (or ``[N]``) with a padded end each."""
    g = torch.Generator().manual_seed(3)
    rows = (B, T) if padded else (N,)
    mask = (torch.arange(T)[None] < torch.tensor([[7], [4], [5]])).float()
    return {
        "hidden": torch.randn(*rows, H, generator=g).to(dtype).requires_grad_(),
        "weight": (torch.randn(V, H, generator=g) * 0.5).to(dtype).requires_grad_(),
        "labels": torch.randint(0, V, rows, generator=g),
        "old": -3.5 + 0.3 * torch.randn(*rows, generator=g),
        "adv": torch.randn(*((B, 1) if padded else (N,)), generator=g),
        "mask": mask if padded else mask.reshape(N),
    }


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def clipped(ratio: Tensor, adv: Tensor) -> Tensor:
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)


def token(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    logp = log_probs(hidden, weight, labels)
    return (clipped(torch.exp(logp - old), adv) * mask).sum() / mask.sum()


def sequence_mean(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    logp = log_probs(hidden, weight, labels)
    return ((clipped(torch.exp(logp - old), adv) * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def entropy_bonus(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return ((clipped(torch.exp(picked - old), adv) - 0.01 * entropy) * mask).sum() / mask.sum()


def kl_to_ref(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    logp = log_probs(hidden, weight, labels)
    kl = torch.exp(old - logp) - (old - logp) - 1
    return ((clipped(torch.exp(logp - logp.detach()), adv) + 0.04 * kl) * mask).sum() / mask.sum()


def soft_cap(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    logits = 3 * torch.tanh(F.linear(hidden, weight).float() / 3)
    logp = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (clipped(torch.exp(logp - old), adv) * mask).sum() / mask.sum()


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    labels = torch.where(mask.bool(), labels, -100).flatten()
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2).float(), labels)


LOSSES: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (token, sequence_mean, entropy_bonus, kl_to_ref, soft_cap, cross_entropy)
}


def schedules(facts: harness.Graphs) -> list[str]:
    return [rewrite.schedule for report in facts.reports for rewrite in report.rewrites]


def in_one_pass(function: Callable[..., Any], args: Any, matmuls: int = 3, **more: Any) -> harness.Graphs:
    facts = harness.check(function, args, **more)
    assert facts.matmuls == matmuls, f"{facts.matmuls} matmuls, {schedules(facts)}"
    assert any(s.startswith("one-pass") for s in schedules(facts))
    return facts


def in_two_passes(function: Callable[..., Any], args: Any, **more: Any) -> harness.Graphs:
    facts = harness.check(function, args, **more)
    assert all(s.startswith("two-pass") for s in schedules(facts)), schedules(facts)
    return facts


@pytest.mark.sample(3, only="dynamic")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("padded", [False, True], ids=["rows", "sequences"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: str, padded: bool, dynamic: bool) -> None:
    in_one_pass(LOSSES[name], list(inputs(DTYPES[dtype], padded).values()), dynamic=dynamic)


@pytest.mark.parametrize("name", LOSSES)
def test_the_schedule_can_be_chosen(name: str) -> None:
    args = list(inputs().values())
    in_two_passes(LOSSES[name], args, schedule="two-pass")
    in_one_pass(LOSSES[name], args, schedule="one-pass")


def test_weight_gradients_may_be_summed_in_their_own_dtype() -> None:
    in_one_pass(token, list(inputs().values()), accumulate="param")


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_asked_for(frozen: str) -> None:
    x = inputs()
    x[frozen].requires_grad_(False)
    in_one_pass(token, list(x.values()), matmuls=2)


def test_no_gradient_no_schedule() -> None:
    x = {name: value.detach() for name, value in inputs().items()}
    facts = harness.check(token, list(x.values()))
    assert facts.matmuls == 1
    assert schedules(facts) == ["forward, vocabulary tiles"]


def test_bias_and_temperature_have_gradients() -> None:
    def function(hidden, weight, labels, old, adv, mask, bias, temperature):  # type: ignore[no-untyped-def]
        logits = F.linear(hidden, weight, bias) / temperature
        logp = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (clipped(torch.exp(logp - old), adv) * mask).sum() / mask.sum()

    bias, temperature = torch.randn(V).requires_grad_(), torch.tensor(0.7).requires_grad_()
    in_one_pass(function, [*inputs().values(), bias, temperature])


def test_low_rank_update_of_a_frozen_head() -> None:
    def function(hidden, weight, labels, old, adv, mask, a, b):  # type: ignore[no-untyped-def]
        logits = F.linear(hidden, weight) + F.linear(F.linear(hidden, a), b)
        logp = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (clipped(torch.exp(logp - old), adv) * mask).sum() / mask.sum()

    x = inputs()
    x["weight"].requires_grad_(False)
    a, b = (0.3 * torch.randn(2, H)).requires_grad_(), (0.3 * torch.randn(V, 2)).requires_grad_()
    facts = harness.graph_facts(list(x.values()), features=[H, 2])
    harness.check(function, [*x.values(), a, b], facts=facts)
    assert all(s.startswith("one-pass") for s in schedules(facts))


def test_tied_embedding() -> None:
    def function(ids, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        return token(torch.tanh(F.embedding(ids, weight)), weight, labels, old, adv, mask)

    x = inputs()
    in_one_pass(function, [x["labels"].flip(1), *list(x.values())[1:]], facts=harness.graph_facts([None, x["weight"]]))


def test_a_reference_model_runs_first() -> None:
    def function(hidden, weight, labels, old, adv, mask, other):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            ref = log_probs(hidden, other, labels)
        logp = log_probs(hidden, weight, labels)
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        return ((clipped(torch.exp(logp - old), adv) + 0.1 * kl) * mask).sum() / mask.sum()

    in_one_pass(function, [*inputs().values(), torch.randn(V, H)], matmuls=4)


def test_two_trained_heads_that_read_each_other() -> None:
    def function(hidden, weight, labels, old, adv, mask, other):  # type: ignore[no-untyped-def]
        a, b = log_probs(hidden, weight, labels), log_probs(hidden, other, labels)
        return ((a - b).square() * mask).sum() / mask.sum()

    in_one_pass(function, [*inputs().values(), torch.randn(V, H).requires_grad_()], matmuls=6)


def test_shifted_labels_and_unread_rows() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logits = F.linear(hidden, weight)[:, :-1]
        logp = logits.log_softmax(-1).gather(-1, labels[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (clipped(torch.exp(logp - old[:, 1:]), adv) * mask[:, 1:]).sum() / mask[:, 1:].sum()

    in_one_pass(function, list(inputs().values()))


def test_layers_before_the_head() -> None:
    def function(hidden, weight, labels, old, adv, mask, layer):  # type: ignore[no-untyped-def]
        return token(torch.tanh(F.linear(hidden, layer)), weight, labels, old, adv, mask)

    in_one_pass(function, [*inputs().values(), torch.randn(H, H).requires_grad_()])


def test_a_written_loop_over_chunks_is_one_region() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        total = torch.zeros(())
        for h, y, o, a, m in zip(*(x.split(7) for x in (hidden, labels, old, adv, mask))):
            total = total + (clipped(torch.exp(log_probs(h, weight, y) - o), a) * m).sum()
        return total / mask.sum()

    in_one_pass(function, list(inputs(padded=False).values()))


# ---------------------------------------------------------------- whole sequences

SEQUENCES = ["GSPO01", "GSPO02", "GSPO04", "GSPO07", "GSPO11", "GSPO24", "LUSPO01", "VESPO01"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", SEQUENCES)
def test_ratios_of_sequences(id: str, dtype: str, dynamic: bool) -> None:
    """Two sequences of 7 tokens, a chunk each."""
    function, args = VARIANTS[id].function, VARIANTS[id].factory("cpu", DTYPES[dtype], True)
    with harness.ProductsInBlocks(7):
        eager = harness.run(function, args)
    truth = harness.run(function, args, wide=True)
    in_one_pass(function, args, dynamic=dynamic, rows=7, reference=(eager, truth))


def sequence_ratio(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    logp = log_probs(hidden, weight, labels)
    ratio = torch.exp(((logp - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True))
    return (clipped(ratio, adv) * mask).sum() / mask.sum()


@pytest.mark.parametrize("rows", [7, 13, 14, 21, 100])
def test_chunks_are_whole_sequences(rows: int) -> None:
    in_one_pass(sequence_ratio, list(inputs().values()), rows=rows)


def test_sequences_that_are_too_long_for_a_chunk() -> None:
    in_two_passes(sequence_ratio, list(inputs().values()), rows=6)
    in_one_pass(sequence_ratio, list(inputs().values()), rows=6, schedule="one-pass")


@pytest.mark.usefixtures("compiled_bodies")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_compiled_body_sums_over_sequences(dynamic: bool) -> None:
    in_one_pass(sequence_ratio, list(inputs().values()), rows=8, codegen="inductor", dynamic=dynamic)


def test_sequences_of_another_batch_reuse_the_compiled_function() -> None:
    call = harness.compiled(sequence_ratio, 8 * V * 4, dynamic=True)
    for batch, tokens in ((3, 7), (2, 7), (4, 5), (5, 3)):
        g = torch.Generator().manual_seed(batch)
        rows = (batch, tokens)
        args = [torch.randn(*rows, H, generator=g), inputs()["weight"], torch.randint(0, V, rows, generator=g)]
        args += [torch.randn(*rows, generator=g) - 3.5, torch.randn(batch, 1, generator=g), torch.ones(rows)]
        args[0].requires_grad_()
        found = harness.problems(
            harness.run(call, args),
            harness.run(sequence_ratio, args),
            harness.run(sequence_ratio, args, wide=True),
            harness.FLOOR[torch.float32],
        )
        assert not found, found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*LOSSES, "sequence_ratio"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recompiled_for_any_size(name: str, dtype: str) -> None:
    """The sizes of hidden and labels have become symbols of their own then."""
    function = LOSSES.get(name, sequence_ratio)
    torch._dynamo.reset()
    facts = harness.Graphs(frozenset({V}), frozenset({H}))
    call = harness.compiled(function, 14 * V * 4, dynamic=None)
    for batch, tokens in ((3, 7), (2, 5), (4, 6)):
        g = torch.Generator().manual_seed(batch)
        rows = (batch, tokens)
        args = [torch.randn(*rows, H, generator=g).to(DTYPES[dtype]).requires_grad_(), inputs(DTYPES[dtype])["weight"]]
        args += [torch.randint(0, V, rows, generator=g), torch.randn(*rows, generator=g) - 3.5]
        args += [torch.randn(batch, 1, generator=g), (torch.rand(rows, generator=g) < 0.7).float()]
        args[5][:, 0] = 1
        reference = harness.run(function, args), harness.run(function, args, wide=True)
        with harness.recording(facts):
            found = harness.problems(harness.run(call, args), *reference, harness.floor(args))
        assert not found, found
    assert all(s == "one-pass" for s in schedules(facts)), schedules(facts)


def test_sums_over_two_lengths() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = log_probs(hidden, weight, labels).view(2, 2, 7)
        return torch.exp(logp.mean(-1)).sum() + torch.exp(logp.mean((-2, -1))).sum()

    x = inputs()
    args = [torch.randn(28, H).requires_grad_(), x["weight"], torch.randint(0, V, (28,)), *list(x.values())[3:]]
    in_two_passes(function, args, rows=14)


def test_sums_over_the_batch_are_no_sequences() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        return torch.exp(log_probs(hidden, weight, labels).mean(0)).sum()

    in_two_passes(function, list(inputs().values()), rows=14)


# ---------------------------------------------------------------- what happens to the loss afterwards


def backward(function: Callable[..., Tensor], steps: Callable[[Tensor], None], wide: bool = False) -> harness.Run:
    args = harness.fresh(list(inputs().values()), wide)
    with harness.widened() if wide else torch.enable_grad():
        loss = function(*args)
        steps(loss)
    return harness.Run([loss.detach()], [args[0].grad, args[1].grad])


def _plain(loss: Tensor) -> None:
    loss.backward()


def _scaled(loss: Tensor) -> None:
    (loss * 3).backward()


def _averaged(loss: Tensor) -> None:
    (loss / 7).backward()


def _given(loss: Tensor) -> None:
    loss.backward(torch.tensor(-0.37, dtype=loss.dtype))


def _twice(loss: Tensor) -> None:
    (2 * loss).backward(retain_graph=True)
    (loss * loss).backward()


def _unused(loss: Tensor) -> None:
    (loss * 0).backward()


@pytest.mark.parametrize("how", [_plain, _scaled, _averaged, _given, _twice, _unused])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_done_with_the_loss(name: str, how: Callable[[Tensor], None]) -> None:
    function = LOSSES[name]
    ours = backward(harness.compiled(function, 5 * V * 4), how)
    found = harness.problems(ours, backward(function, how), backward(function, how, True), harness.FLOOR[torch.float32])
    assert not found, found


def test_gradients_accumulate() -> None:
    call = harness.compiled(token, 5 * V * 4)

    def steps(function: Callable[..., Tensor], wide: bool) -> harness.Run:
        args = harness.fresh(list(inputs().values()), wide)
        with harness.widened() if wide else torch.enable_grad():
            losses = [function(*args), function(*args) * 0.5]
            for loss in losses:
                loss.backward()
        return harness.Run([x.detach() for x in losses], [args[0].grad, args[1].grad])

    assert not harness.problems(steps(call, False), steps(token, False), steps(token, True), 1e-6)


def test_the_forward_alone_is_right() -> None:
    args = list(inputs().values())
    loss = harness.compiled(token, 5 * V * 4)(*args)
    assert torch.allclose(loss, token(*args))


# ---------------------------------------------------------------- other outputs


def test_detached_metrics_do_not_matter() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = log_probs(hidden, weight, labels)
        ratio = torch.exp(logp - old)
        loss = (clipped(ratio, adv) * mask).sum() / mask.sum()
        share = ((ratio - 1).abs() > 0.2).float().mean()
        return loss, logp.detach(), ((logp - old) * mask).sum().detach(), share

    in_one_pass(function, list(inputs().values()))


@pytest.mark.parametrize("metric", ["logp", "kl", "both"])
def test_differentiable_metrics_are_right(metric: str) -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = log_probs(hidden, weight, labels)
        loss = (clipped(torch.exp(logp - old), adv) * mask).sum() / mask.sum()
        kl = ((logp - old).square() * mask).sum() / mask.sum()
        return {"logp": (loss, logp), "kl": (loss, kl), "both": (loss, logp, kl)}[metric]

    harness.check(function, list(inputs().values()))


def test_a_loss_a_token() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        return clipped(torch.exp(log_probs(hidden, weight, labels) - old), adv) * mask

    in_two_passes(function, list(inputs().values()))


# ---------------------------------------------------------------- what must take two passes


def test_all_rows_first() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = log_probs(hidden, weight, labels)
        return torch.exp((logp * mask).sum() / mask.sum() / 4).square()

    in_two_passes(function, list(inputs().values()))


def test_a_ratio_of_sums_over_all_rows() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = log_probs(hidden, weight, labels)
        return (logp * adv).sum() / torch.exp(logp).sum()

    in_two_passes(function, list(inputs().values()))


def test_half_precision_keeps_the_scale_of_its_loss() -> None:
    x = inputs(torch.float16)
    call = harness.compiled(token, 5 * V * 2)
    facts = harness.graph_facts(list(x.values()))
    scale = 2.0**16
    with harness.recording(facts):
        loss = call(*x.values())
        (loss * scale * 1e-3).backward()
    assert all(s.startswith("two-pass") for s in schedules(facts)), schedules(facts)
    wide = harness.fresh(x, True)
    with harness.widened():
        (token(*wide.values()) * scale * 1e-3).backward()
    for name in ("hidden", "weight"):
        ours, truth = x[name].grad, wide[name].grad
        assert ours is not None and truth is not None
        assert harness.error(ours, truth) < 4e-3


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


def test_a_backward_that_is_not_linear() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        logp = _Clip.apply(log_probs(hidden, weight, labels))
        return (clipped(torch.exp(logp - old), adv) * mask).sum() / mask.sum()

    in_two_passes(function, list(inputs().values()))


def test_a_hook_on_the_gradient_of_hidden_sees_the_scaled_one() -> None:
    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        return token(_Clip.apply(torch.tanh(hidden)), weight, labels, old, adv, mask)

    in_one_pass(function, list(inputs().values()))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("row", ["nan", "inf", "masked_nan"])
def test_non_finite_rows(row: str) -> None:
    x = inputs()
    with torch.no_grad():
        place = (1, 5) if row == "masked_nan" else (0, 2)
        x["hidden"][place] = float("inf" if row == "inf" else "nan")
    in_one_pass(token, list(x.values()))


def test_no_rows() -> None:
    x = {name: value[:0].detach().requires_grad_(value.requires_grad) for name, value in inputs(padded=False).items()}
    x["weight"] = inputs()["weight"]

    def function(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        return (clipped(torch.exp(log_probs(hidden, weight, labels) - old), adv) * mask).sum()

    harness.check(function, list(x.values()), rewritten=False)


@pytest.fixture
def compiled_bodies() -> Iterator[None]:
    """Fails where a body could not be compiled: it would have run in eager mode, which is right and slow."""
    body.clear()
    yield
    assert body.cached()
    assert not any(b.uncompiled for b in body.cached())


@pytest.mark.usefixtures("compiled_bodies")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_body_gives_the_same(dtype: str) -> None:
    in_one_pass(token, list(inputs(DTYPES[dtype]).values()), codegen="inductor")


# ---------------------------------------------------------------- rows without a gradient


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every gradient matmul that a chunk runs."""
    found: list[int] = []
    contract, add_product = runtime._Loop._contract, runtime.add_product

    def record_contract(value: Tensor, weight: Tensor, out: Tensor) -> None:
        found.append(value.shape[0])
        contract(value, weight, out)

    def record_product(total: runtime.Sum, left: Tensor, right: Tensor) -> None:
        found.append(right.shape[0])
        add_product(total, left, right)

    monkeypatch.setattr(runtime._Loop, "_contract", staticmethod(record_contract))
    monkeypatch.setattr(runtime, "add_product", record_product)
    return found


@pytest.mark.parametrize("schedule", ["one-pass", "two-pass"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_gradient_cost_no_gradient_matmuls(schedule: str, dtype: str, multiplied: list[int]) -> None:
    x = inputs(DTYPES[dtype], padded=False)
    x["mask"], x["adv"] = torch.ones(N), torch.ones(N)
    x["old"] = log_probs(x["hidden"], x["weight"], x["labels"]).detach()  # nothing is clipped
    more: dict[str, Any] = {"rows": 9, "schedule": schedule, "disable": ["tiles"]}
    harness.check(token, list(x.values()), **more)
    assert sum(multiplied) == 2 * N
    multiplied.clear()
    x["mask"] = torch.zeros(N)
    x["mask"][[0, 3, 4, 11, 20]] = 1
    harness.check(token, list(x.values()), rewritten=False, **more)  # compiled before
    assert sum(multiplied) == 2 * 5


def test_no_row_has_a_gradient(multiplied: list[int]) -> None:
    x = inputs(padded=False)
    x["adv"] = torch.zeros(N)
    harness.check(token, list(x.values()), rows=9)
    assert sum(multiplied) == 0


def test_clipped_rows_have_no_gradient(multiplied: list[int]) -> None:
    x = inputs(padded=False)
    x["mask"] = torch.ones(N)
    x["adv"] = torch.ones(N)
    x["old"] = torch.where(torch.arange(N) % 3 == 0, -20.0, 0.0)
    in_one_pass(token, list(x.values()), rows=9)
    assert sum(multiplied) == 2 * 14


@pytest.mark.parametrize("where", ["dead", "live", "weight"])
@pytest.mark.parametrize("schedule", ["one-pass", "two-pass"])
def test_what_is_not_finite_spreads_as_in_eager(where: str, schedule: str) -> None:
    def selected(hidden, weight, labels, old, adv, mask):  # type: ignore[no-untyped-def]
        return torch.where(mask.bool(), log_probs(hidden, weight, labels) * adv, 0.0).sum()

    for function in (token, selected):
        x = inputs(padded=False)
        x["mask"] = (torch.arange(N) % 4 == 0).float()
        with torch.no_grad():
            if where == "weight":
                x["weight"][5, 2] = float("inf")
            else:
                x["hidden"][1 if where == "dead" else 4, 3] = float("nan")
        harness.check(function, list(x.values()), rows=9, schedule=schedule)


@pytest.mark.parametrize("columns", [3, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99, 1.0])
def test_packing(share: float, dtype: torch.dtype, columns: int) -> None:
    value = torch.randn(1000, columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    live = torch.rand(1000, generator=torch.Generator().manual_seed(1)) < share
    packing = Packing.of(live)
    assert torch.equal(packing.order.sort().values, live.nonzero().squeeze(1))
    assert torch.equal(packing.rows(value), value[packing.order])
    assert torch.equal(packing.rows_in_place(value.clone()), value[packing.order])


# ---------------------------------------------------------------- two passes that keep logits


def tokens(hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return clipped(torch.exp(log_probs(hidden, weight, labels) - old), adv) * mask


@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 8, 20, 21, 1000])
def test_kept_logits(rows: int, dtype: str, dynamic: bool) -> None:
    x = inputs(DTYPES[dtype])
    keep = rows * V * x["weight"].element_size()
    facts = in_two_passes(tokens, list(x.values()), keep_bytes=keep, dynamic=dynamic, rewritten=False)
    assert facts.regions == 2
    assert not any(report.rejections for report in facts.reports)
    assert any("logits kept" in s for s in schedules(facts)) == (rows > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_kept_logits_and_others_in_one_chunk(rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for the weight's gradient, so none is rounded before another is added."""
    x = inputs(DTYPES[dtype])
    keep = rows * V * x["weight"].element_size()
    sums: list[int] = []
    add = runtime.add_product

    def record(total: runtime.Sum, left: Tensor, right: Tensor) -> None:
        sums.append(left.shape[1])
        add(total, left, right)

    monkeypatch.setattr(runtime, "add_product", record)
    in_two_passes(tokens, list(x.values()), keep_bytes=keep, rows=1000, rewritten=False)
    assert len(set(sums)) == 1  # of the rows with a gradient, all of them


@pytest.mark.parametrize("rows", [8, 1000])
def test_kept_logits_are_not_computed_again(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    projected = []
    project = torch.mm

    def record(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        projected.extend([a.shape[0]] if b.shape[1] == V else [])
        return project(a, b, **more)

    monkeypatch.setattr(runtime.torch, "mm", record)
    x = inputs()
    harness.compiled(tokens, 5 * V * 4, keep_bytes=rows * V * 4)(*x.values()).sum().backward()
    assert sum(projected) == N + (N - min(rows, N))


def test_kept_logits_with_a_bias_serve_a_second_backward() -> None:
    def function(hidden, weight, labels, bias):  # type: ignore[no-untyped-def]
        return F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    x = inputs()
    args = [x["hidden"], x["weight"], x["labels"], torch.randn(V).requires_grad_()]
    facts = in_two_passes(function, args, keep_bytes=12 * V * 4, rewritten=False)
    assert any("logits kept" in s for s in schedules(facts))
    torch._dynamo.reset()  # torch lets a backward free what it read, unless the first one that it sees keeps the graph
    out = harness.compiled(function, 5 * V * 4, keep_bytes=12 * V * 4)(*args).sum()
    leaves = (args[0], args[1], args[3])
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    again = torch.autograd.grad(out, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.usefixtures("compiled_bodies")
def test_kept_logits_under_generated_code() -> None:
    args = list(inputs().values())
    facts = in_two_passes(tokens, args, keep_bytes=8 * V * 4, codegen="inductor", rewritten=False)
    assert any("logits kept" in s for s in schedules(facts))
