"""The implementations that ``bench`` compares.

eager, compile, chunker   the loss as it is, under torch.compile, and that with its AutoChunker
ours[:option=value,...]   this package, with options of ours
trl, liger, cce, linear-ce   other packages' fused heads, where they are installed and do that loss
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_grpo import backend
from inductor_grpo.tools.bench_losses import SEQUENCES, Inputs, Loss, Shape, Step

SCHEDULES = ["ours", "ours:schedule=two-pass", "ours:accumulate=param"]
DEFAULT = {
    "cuda": ["eager", "compile", "chunker", *SCHEDULES, "ours:row_kernel=on", "trl", "liger", "cce", "linear-ce"],
    "cpu": ["eager", "compile", "chunker", *SCHEDULES, "trl", "liger", "cce", "linear-ce"],
}


class Skipped(Exception):
    """A way that cannot do this work here; the message says why."""


def make(name: str, loss: Loss, shape: Shape) -> Step:
    """The way called ``name``, with nothing compiled before it.  Raises Skipped, and ValueError for an unknown name."""
    torch._dynamo.reset()
    kind, _, extra = name.partition(":")
    if kind not in _WAYS:
        raise ValueError(f"unknown way {name!r}; there are {', '.join(_WAYS)}, and ours:option=value,...")
    return _WAYS[kind](extra, loss, shape)


def check(name: str) -> str:
    """``name``, if it is one of a way.  Raises ValueError."""
    kind, colon, extra = name.partition(":")
    if kind not in _WAYS or (colon and kind != "ours"):
        raise ValueError(f"unknown way {name!r}; there are {', '.join(_WAYS)}, and ours:option=value,...")
    if kind == "ours":
        from inductor_grpo import config

        config.current().with_options(_options(extra))
    return name


def note(name: str) -> str:
    """What became of a way once it ran: the schedules of ours, whether AutoChunker did anything."""
    if name.startswith("ours"):
        report = backend.last_report()
        if report is None or not report.rewrites:
            return "left alone"
        return "; ".join(dict.fromkeys(r.schedule for r in report.rewrites)) + _by_row(name)
    if name == "chunker":
        from torch._inductor import metrics

        return "applied" if getattr(metrics, "num_auto_chunking", 0) else "not applied"
    return ""


def _by_row(name: str) -> str:
    from inductor_grpo import body

    if "row_kernel=on" not in name:
        return ""
    reasons = [b.no_row_kernel for b in body.cached()]
    return "; row kernel" if None in reasons else f"; no row kernel: {reasons[0] if reasons else 'no chunk body'}"


def _options(extra: str) -> dict[str, Any]:
    options: dict[str, Any] = {"grpo.min_logits_bytes": 0}
    for item in filter(None, extra.split(",")):
        key, _, given = item.partition("=")
        options[f"grpo.{key}"] = json.loads(given) if given[:1] in "[{0123456789" else given
    return options


def _function(loss: Loss, shape: Shape) -> Step:
    def step(x: Inputs) -> Tensor:
        return loss.function(x, shape.soft_cap)

    return step


def _eager(extra: str, loss: Loss, shape: Shape) -> Step:
    return _function(loss, shape)


def _compile(extra: str, loss: Loss, shape: Shape) -> Step:
    return torch.compile(_function(loss, shape))


def _chunker(extra: str, loss: Loss, shape: Shape) -> Step:
    from torch._inductor import config, metrics

    if not hasattr(config, "auto_chunker"):
        raise Skipped("this torch has no AutoChunker")
    metrics.reset()
    return torch.compile(_function(loss, shape), options={"auto_chunker.enable": True})


def _ours(extra: str, loss: Loss, shape: Shape) -> Step:
    from inductor_grpo import body

    body.clear()
    return torch.compile(_function(loss, shape), backend=backend.inductor_grpo, options=_options(extra))


def _imported(load: Callable[[], Any], package: str) -> Any:
    try:
        return load()
    except Exception as error:  # some packages fail in ways of their own where a dependency lacks
        reason = "not installed" if isinstance(error, ImportError) and error.name == package else repr(error)
        raise Skipped(f"{package}: {reason}") from None


def _trl(extra: str, loss: Loss, shape: Shape) -> Step:
    def load() -> Any:
        from trl.kernels import ChunkedLogProbFunction

        return ChunkedLogProbFunction

    chunked = _imported(load, "trl")

    def step(x: Inputs) -> Tensor:
        with torch.set_grad_enabled(loss.training):
            asked = ("entropy",) if loss.entropy else ()
            given = (x["hidden"], x["weight"], None, x["labels"], 1.0, 8192, shape.soft_cap, 1.0, asked)
            logp, entropy, *_ = chunked.apply(*given)
            return loss.objective(logp.float(), entropy, x)

    return step


def _liger(extra: str, loss: Loss, shape: Shape) -> Step:
    from inductor_grpo.tools.bench_losses import cross_entropy, token_grpo

    if shape.soft_cap is not None:
        raise Skipped("liger: no soft cap here")
    if loss.objective is cross_entropy:
        return _liger_cross_entropy()
    if loss.objective is not token_grpo or shape.n % SEQUENCES:
        raise Skipped("liger: does not have this loss")

    def load() -> Any:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")

    fused = _imported(load, "liger_kernel")

    def step(x: Inputs) -> Tensor:
        hidden = x["hidden"].view(SEQUENCES, -1, shape.h)
        rows = {name: x[name].view(SEQUENCES, -1) for name in ("labels", "mask", "advantages", "old")}
        found = fused(
            hidden,
            x["weight"],
            rows["labels"],
            torch.ones_like(rows["mask"]),
            rows["advantages"][:, 0].contiguous(),
            old_per_token_logps=rows["old"],
        )
        return found[0] if isinstance(found, tuple) else found

    return step


def _liger_cross_entropy() -> Step:
    def load() -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss()

    fused = _imported(load, "liger_kernel")
    return lambda x: fused(x["weight"], x["hidden"], x["labels"])


def _cce(extra: str, loss: Loss, shape: Shape) -> Step:
    if loss.entropy:
        raise Skipped("cut-cross-entropy: no entropy")

    def load() -> Any:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy

    fused = _imported(load, "cut_cross_entropy")

    def step(x: Inputs) -> Tensor:
        with torch.set_grad_enabled(loss.training):
            nll = fused(x["hidden"], x["weight"], x["labels"], softcap=shape.soft_cap, reduction="none")
            return loss.objective(-nll.float(), None, x)

    return step


def _linear_ce(extra: str, loss: Loss, shape: Shape) -> Step:
    from inductor_grpo.tools.bench_losses import cross_entropy

    fused, options = getattr(F, "linear_cross_entropy", None), getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if fused is None or options is None:
        raise Skipped("this torch has no chunked F.linear_cross_entropy")
    if loss.objective is not cross_entropy or shape.soft_cap is not None:
        raise Skipped("F.linear_cross_entropy: plain cross entropy alone")
    return lambda x: fused(x["hidden"], x["weight"], x["labels"], options=options())


_WAYS: dict[str, Callable[[str, Loss, Shape], Step]] = {
    "eager": _eager,
    "compile": _compile,
    "chunker": _chunker,
    "ours": _ours,
    "trl": _trl,
    "liger": _liger,
    "cce": _cce,
    "linear-ce": _linear_ce,
}
