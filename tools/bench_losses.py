"""The work that ``bench`` times: inputs of a plausible step, and losses as people write them.

A loss is written in two parts: what it needs of the head (log-probs, entropies), and what it makes of them.  So a way
that has a head of its own (a peer's fused function) runs the same loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Inputs = dict[str, Tensor]
Objective = Callable[[Tensor, "Tensor | None", Inputs], Tensor]
Step = Callable[[Inputs], Tensor]
SEQUENCES = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens, hidden size and vocabulary, and the soft cap of the logits (None: none)."""

    n: int
    h: int
    v: int
    soft_cap: float | None = None

    @staticmethod
    def parse(text: str) -> Shape:
        """A name of :data:`SHAPES`, or "tokens,hidden,vocabulary" with a soft cap as a fourth number.

        Raises ValueError."""
        if text in SHAPES:
            return SHAPES[text]
        try:
            n, h, v, *cap = text.split(",")
            return Shape(int(n), int(h), int(v), *map(float, cap))
        except (TypeError, ValueError):
            raise ValueError(f"{text!r}: must be tokens,hidden,vocabulary or one of {', '.join(SHAPES)}") from None

    def __str__(self) -> str:
        return f"{self.n}x{self.h}x{self.v}" + (f" soft-cap {self.soft_cap:g}" if self.soft_cap else "")


SHAPES = {
    "qwen3-8b": Shape(8192, 4096, 151936),
    "llama-3.2-1b": Shape(16384, 2048, 128256),
    "gemma": Shape(8192, 3840, 262144, 30.0),
    "cpu": Shape(1536, 1024, 32000),
    "cpu-small": Shape(512, 256, 16000),
    "tiny": Shape(64, 32, 500),
}


def make_inputs(
    n: int, h: int, v: int, dtype: torch.dtype, device: str, live: float = 1.0, peaked: float = 0.0
) -> Inputs:
    """Hidden ``[n, h]``, weight ``[v, h]``, labels, old log-probs, advantages (one a sequence, repeated) and mask
    ``[n]``, and for the packed losses the sequence of each token and the lengths.

    A share of ``live`` tokens is unmasked.  ``peaked``, if not 0, is about what a label has above the logits of tokens
    as frequent as it, in a vocabulary with the frequencies of a language: 8 gives the log-probs of a trained model, of
    which a few columns have nearly all the probability.  At 0 all columns are alike."""
    g = torch.Generator(device).manual_seed(0)
    weight = (torch.randn(v, h, generator=g, device=device) * h**-0.5).to(dtype)
    labels = torch.randint(0, v, (n,), generator=g, device=device)
    hidden = torch.randn(n, h, generator=g, device=device)
    if peaked:
        rank = 1 + torch.randperm(v, generator=g, device=device)
        labels = torch.multinomial(1 / rank, n, replacement=True, generator=g)
        weight[:, 0] = -rank.log() / 8
        hidden[:, 0] = 8
        hidden[:, 1:] += peaked * weight[labels, 1:]
    hidden = hidden.to(dtype)
    noise = 0.1 * torch.randn(n, generator=g, device=device)
    old = noise + torch.cat(
        [
            F.linear(x, weight).float().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
            for x, y in zip(hidden.split(512), labels.split(512))
        ]
    )
    place = torch.arange(n, device=device) * SEQUENCES // max(n, 1)
    cuts = torch.randint(0, n + 1, (SEQUENCES - 1,), generator=g, device=device).sort().values
    packed = torch.searchsorted(cuts, torch.arange(n, device=device), right=True)
    return {
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "old": old,
        "advantages": torch.randn(SEQUENCES, generator=g, device=device)[place],
        "mask": (torch.rand(n, generator=g, device=device) < live).float(),
        "ids": packed,
        "lengths": torch.bincount(packed, minlength=SEQUENCES).clamp(min=1).float(),
    }


# The head ---------------------------------------------------------------------------------------------------


def head(hidden: Tensor, x: Inputs, entropy: bool, soft_cap: float | None, up: torch.dtype) -> tuple[Tensor, ...]:
    """Log-probs of the labels ``[n]`` and, where asked for, entropies ``[n]``."""
    logits = F.linear(hidden, x["weight"]).to(up)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, x["labels"].unsqueeze(-1)).squeeze(-1)
    return (picked, -(logp.exp() * logp).sum(-1)) if entropy else (picked,)


def head_in_parts(x: Inputs, entropy: bool, soft_cap: float | None) -> Iterator[tuple[Tensor, ...]]:
    """The head in the dtype of its inputs, some rows at a time; their logits are computed again in the backward."""
    parts = zip(x["hidden"].split(256), x["labels"].split(256))
    for hidden, labels in parts:
        given = {**x, "labels": labels}
        yield checkpoint(head, hidden, given, entropy, soft_cap, hidden.dtype, use_reentrant=False)


# What losses make of it -------------------------------------------------------------------------------------


def clipped(logp: Tensor, x: Inputs) -> Tensor:
    """The clipped objective of each token."""
    ratio = torch.exp(logp - x["old"])
    return -torch.min(ratio * x["advantages"], ratio.clamp(0.8, 1.2) * x["advantages"])


def token_grpo(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    return clipped(logp, x).mean()


def with_entropy(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    assert entropy is not None
    return (clipped(logp, x) - 0.01 * entropy).mean()


def masked(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    return (clipped(logp, x) * x["mask"]).sum() / x["mask"].sum()


def padded_gspo(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    """Ratios of whole sequences, of equal length in a padded batch."""
    rows = {name: x[name].view(SEQUENCES, -1) for name in ("old", "advantages", "mask")}
    difference = (logp.view(SEQUENCES, -1) - rows["old"]) * rows["mask"]
    ratio = torch.exp(difference.sum(-1, keepdim=True) / rows["mask"].sum(-1, keepdim=True))
    objective = torch.min(ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"])
    return -(objective * rows["mask"]).sum() / rows["mask"].sum()


def packed_gspo(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    """Ratios of whole sequences, one behind the other."""
    difference = (logp - x["old"]) * x["mask"]
    total = difference.new_zeros(x["lengths"].shape[0]).index_add_(0, x["ids"], difference)
    ratio = torch.exp(total / x["lengths"])[x["ids"]]
    objective = torch.min(ratio * x["advantages"], ratio.clamp(0.8, 1.2) * x["advantages"])
    return -(objective * x["mask"]).sum() / x["mask"].sum()


def cross_entropy(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    return -logp.mean()


def log_probs(logp: Tensor, entropy: Tensor | None, x: Inputs) -> Tensor:
    return logp


@dataclasses.dataclass(frozen=True)
class Loss:
    """``objective(logp, entropy, inputs)``; ``training``: with a backward."""

    objective: Objective
    entropy: bool = False
    training: bool = True

    def function(self, x: Inputs, soft_cap: float | None = None) -> Tensor:
        """The loss as one writes it, in the dtype of the inputs with float32 log-probs."""
        up = torch.promote_types(x["hidden"].dtype, torch.float32)
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self.objective(*_pair(head(x["hidden"], x, self.entropy, soft_cap, up)), x)

    def in_parts(self, x: Inputs, soft_cap: float | None = None) -> Tensor:
        """The same in the inputs' dtype with little memory: the yardstick, in float64."""
        parts = zip(*head_in_parts(x, self.entropy, soft_cap))
        return self.objective(*_pair(tuple(map(torch.cat, parts))), x)


def _pair(values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    return values[0], values[1] if len(values) > 1 else None


LOSSES = {
    "grpo": Loss(token_grpo),
    "masked": Loss(masked),
    "gspo": Loss(padded_gspo),
    "gspo-packed": Loss(packed_gspo),
    "entropy": Loss(with_entropy, entropy=True),
    "cross-entropy": Loss(cross_entropy),
    "forward": Loss(log_probs, training=False),
}
