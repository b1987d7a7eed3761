"""The inputs that the cases share: small, seeded, with sizes that have no common factor."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

BATCH, PROMPT, TIME, HIDDEN, VOCABULARY = 3, 2, 7, 16, 127
LENGTHS = (7, 3, 5)
"""Answer tokens of each sequence; packed they are 15 tokens."""


@dataclasses.dataclass
class Batch:
    """Padded, or packed where ``cu`` is there.  B sequences of T answer tokens, N = B * T or the sum of the lengths.

    ``hidden``  [B, T, H] or [N, H], differentiable      ``weight``  [V, H], differentiable
    ``ids``     [B, T] or [N] tokens                     ``mask``    the same, bool: answer tokens that count
    ``old``, ``ref``  the same: log-probs of other policies, float32
    ``advantages``    the same, float32, equal within a sequence; ``scores`` [B] are theirs
    ``cu``      [B + 1] int32, where sequences start
    """

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    mask: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    scores: Tensor
    cu: Tensor


def _normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def padded(dtype: torch.dtype = torch.float32, prompt: int = 0) -> Batch:
    """A padded batch; ``hidden`` has ``prompt`` more positions in front, and ``ids`` as many prompt tokens."""
    hidden = _normal(BATCH, prompt + TIME, HIDDEN, seed=1).to(dtype).requires_grad_()
    weight = _normal(VOCABULARY, HIDDEN, seed=2, scale=0.3).to(dtype).requires_grad_()
    ids = torch.randint(0, VOCABULARY, (BATCH, prompt + TIME), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(TIME) < lengths[:, None]
    answers = ids[:, prompt:]
    logits = hidden.detach()[:, prompt:].float() @ weight.detach().float().T
    logp = logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
    old = logp + _normal(BATCH, TIME, seed=4, scale=0.3)
    ref = logp + _normal(BATCH, TIME, seed=5, scale=0.3)
    scores = torch.tensor([1.0, -0.7, 0.4])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Batch(hidden, weight, ids, mask, old, ref, scores[:, None].expand(BATCH, TIME).contiguous(), scores, cu)


def packed(dtype: torch.dtype = torch.float32) -> Batch:
    """The same batch without padding; the mask leaves out the first token of each sequence."""
    wide = padded(dtype)
    keep = wide.mask
    mask = torch.ones(int(keep.sum()), dtype=torch.bool)
    mask[wide.cu[:-1].long()] = False
    return Batch(
        wide.hidden.detach()[keep].requires_grad_(),
        wide.weight,
        wide.ids[keep],
        mask,
        wide.old[keep],
        wide.ref[keep],
        wide.advantages[keep],
        wide.scores,
        wide.cu,
    )


def policy_loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A clipped token-level loss, for packages whose functions end at log-probs."""
    ratio = (logp - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum()
