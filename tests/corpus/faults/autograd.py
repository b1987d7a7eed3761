"""Strides; who needs a gradient, and how often."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.faults.inputs import head, ints, naive, pick, rand, rng
from tests.corpus.faults.registry import case


@case("stride_hidden_slice", "non-contiguous [1,N,H] hidden, flattened", "verl-project/verl#7235", group="stride")
def _():
    def fn(full, w, t):
        return naive(full[:, ::2, :].flatten(0, 1), w, t)

    return (
        fn,
        (rand(1, 26, 16, seed=1, grad=True), rand(37, 16, seed=2, grad=True), ints(37, 13)),
        {},
        "hidden gradient must not be silently None or zero",
    )


@case("stride_hidden_last_dim", "hidden with stride(-1) != 1", "NVIDIA/TransformerEngine#2734", group="stride")
def _():
    def fn(ht, w, t):
        return naive(ht.t(), w, t)

    return fn, (rand(16, 13, seed=1, grad=True), rand(37, 16, seed=2, grad=True), ints(37, 13)), {}, "equal to eager"


@case("stride_weight_columns", "weight is a strided view", "fla-org/flash-linear-attention#1253", group="stride")
def _():
    def fn(h, big, t):
        return naive(h, big[:, ::2], t)

    h, _, t = head()
    return fn, (h, rand(37, 32, seed=2, grad=True), t), {}, "gradient of unused columns is zero"


@case("stride_target_column", "targets are a column of a 2-D tensor", "huggingface/trl#2683", group="stride")
def _():
    def fn(h, w, ids):
        return naive(h, w, ids[:, 1])

    h, w, _ = head()
    return fn, (h, w, ints(37, 13, 3)), {}, "equal to eager"


@case(
    "stride_grad_sum",
    "output.sum(): grad_output is one element, stride 0",
    "ROCm/TransformerEngine#623",
    group="stride",
    own_backward=True,
)
def _():
    def fn(h, w, t):
        return torch.autograd.grad(naive(h, w, t).sum(), (h, w))

    return fn, head(n=64), {}, "kernel must not read grad_output as if it had N elements"


@case("stride_grad_masked", "loss reads out[mask] only", "verl-project/verl#6960", group="stride")
def _():
    def fn(h, w, t, mask):
        return (naive(h, w, t) * mask).sum()

    return fn, (*head(), (torch.arange(13) % 3 == 0).float()), {}, "rows off the mask: zero hidden gradient"


@case("grad_hidden_only", "frozen head", "verl-project/verl#3765", group="autograd")
def _():
    return naive, head(gw=False), {}, "hidden grad right; no [V,H] buffer allocated"


@case("grad_none", "nothing needs grad", "inclusionAI/AReno#125", group="autograd")
def _():
    return naive, head(gh=False, gw=False), {}, "inference graph: same match, different pass stage"


@case(
    "grad_no_grad_context", "params need grad but the call is under no_grad", "inclusionAI/AReno#125", group="autograd"
)
def _():
    def fn(h, w, t):
        with torch.no_grad():
            return naive(h, w, t)

    return fn, head(), {}, "output must not require grad"


@case("grad_inference_mode", "call under inference_mode", "inclusionAI/AReno#125", group="autograd")
def _():
    def fn(h, w, t):
        with torch.inference_mode():
            return naive(h, w, t).clone()

    return fn, head(gh=False, gw=False), {}, "equal to eager"


@case("grad_tied_embedding", "embedding and head share one parameter", "NVIDIA-NeMo/RL#2363", group="autograd")
def _():
    def fn(table, ids, t):
        return naive(torch.tanh(F.embedding(ids, table)), table, t)

    return (
        fn,
        (rand(37, 16, seed=2, grad=True), ints(37, 13, seed=5), ints(37, 13)),
        {},
        "one gradient = lookup part + head part",
    )


@case("grad_lora_head", "head plus low-rank update, base frozen", "huggingface/trl#4612", group="autograd")
def _():
    def fn(h, w, a, b, t, s):
        return pick((F.linear(h, w) + s * F.linear(F.linear(h, a), b)).log_softmax(-1), t)

    h, w, t = head(gw=False)
    return (
        fn,
        (h, w, rand(4, 16, seed=3, grad=True), rand(37, 4, seed=4, grad=True), t, 2.0),
        {},
        "a and b affect the value and receive gradients",
    )


@case("grad_quantised_head", "int8 weight dequantised per row", "unslothai/unsloth-zoo#1132", group="autograd")
def _():
    def fn(h, q, s, t):
        return naive(h, q.to(h.dtype) * s, t)

    h, _, t = head()
    q = torch.randint(-127, 128, (37, 16), generator=rng(3), dtype=torch.int8)
    return (
        fn,
        (h, q, (torch.rand(37, 1, generator=rng(4)) * 0.01).requires_grad_(), t),
        {},
        "weight is not a parameter; scale gets a gradient",
    )


@case(
    "grad_packed_weight_shape",
    "packed 4-bit buffer handed to linear as is",
    "unslothai/unsloth-zoo#1132",
    group="autograd",
    raises=RuntimeError,
)
def _():
    h, _, t = head()
    return naive, (h, torch.zeros(37 * 16 // 2, 1, dtype=torch.uint8), t), {}, "raise, do not broadcast or reinterpret"


@case(
    "grad_logits_as_hidden",
    "logits passed where hidden states belong",
    "unslothai/unsloth-zoo#708",
    group="autograd",
    raises=RuntimeError,
)
def _():
    _, w, t = head()
    return naive, (rand(13, 37, seed=1), w, t), {}, "shape error, not silence"


@case("grad_checkpoint", "head inside torch.utils.checkpoint", "pytorch/pytorch#144035", group="autograd")
def _():
    def fn(h, w, t):
        return checkpoint(naive, h, w, t, use_reentrant=False)

    return fn, head(), {}, "same saved tensors in forward and recompute"


@case(
    "grad_double_backward", "gradient of a gradient norm", "pytorch/pytorch#91469", group="autograd", own_backward=True
)
def _():
    def fn(h, w, t):
        (g,) = torch.autograd.grad(naive(h, w, t).sum(), h, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (h, w))

    return fn, head(), {}, "right or a clear error; never silently wrong"


@case("grad_negative_upstream", "advantages of mixed sign as cotangent", "linkedin/Liger-Kernel#968", group="autograd")
def _():
    def fn(h, w, t, adv):
        return -(naive(h, w, t) * adv).sum()

    return fn, (*head(), rand(13, seed=6)), {}, "upstream gradient reaches every row with its own sign"


class _ScaleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 1.0
        y += 1.0
        return y

    @staticmethod
    def backward(ctx, g):
        return g


@case(
    "grad_user_function_inplace",
    "user autograd.Function with an in-place op upstream",
    "pytorch/pytorch#180642",
    group="autograd",
)
def _():
    def fn(h, w, t):
        return naive(_ScaleInPlace.apply(h), w, t)

    return fn, head(), {}, "gradient passes through the user function"


def _mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


@case(
    "grad_dtensor_mixed", "plain hidden, DTensor weight", "huggingface/trl#6065", group="autograd", raises=RuntimeError
)
def _():
    from torch.distributed.tensor import Replicate, distribute_tensor

    h, w, t = head(gh=False, gw=False)
    return naive, (h, distribute_tensor(w, _mesh(), [Replicate()]), t), {}, "same clear error as eager"
