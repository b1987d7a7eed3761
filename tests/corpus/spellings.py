"""Further spellings of the field, beside the variants: ``SPELLINGS[name] -> (function, make_args)``.

All take hidden first and the head's weight second.  Sizes are B=2, T=7, H=16, V=41: tokens, features and vocabulary
share no factor that could make one pass for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

B, T, H, V = 2, 7, 16, 41

Arguments = Callable[[torch.dtype], tuple[Any, ...]]
SPELLINGS: dict[str, tuple[Callable[..., Any], Arguments]] = {}


def normal(
    *shape: int, seed: int, scale: float = 1.0, grad: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).requires_grad_(grad)


def ids(*shape: int, seed: int = 3, high: int = V) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def padded(dtype: torch.dtype) -> tuple[Any, ...]:
    """hidden [B,T,H], weight [V,H], labels [B,T]."""
    return (
        normal(B, T, H, seed=1, grad=True, dtype=dtype),
        normal(V, H, seed=2, scale=0.4, grad=True, dtype=dtype),
        ids(B, T),
    )


def packed(dtype: torch.dtype) -> tuple[Any, ...]:
    """hidden [N,H], weight [V,H], labels [N]."""
    h, w, y = padded(dtype)
    return h.detach().flatten(0, 1).requires_grad_(), w, y.flatten()


def ignoring(dtype: torch.dtype) -> tuple[Any, ...]:
    """Packed, with every third label -100."""
    h, w, y = packed(dtype)
    return h, w, y.masked_fill(torch.arange(y.numel()) % 3 == 0, -100)


def with_more(base: Arguments, *more: Callable[[torch.dtype], Any]) -> Arguments:
    return lambda dtype: (*base(dtype), *(make(dtype) for make in more))


def spelling(args: Arguments = padded) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        assert name not in SPELLINGS, name
        SPELLINGS[name] = (function, args)
        return function

    return register


def pick(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# ---------------------------------------------------------------- the head


@spelling()
def head_einsum(h, w, y):
    return pick(torch.einsum("bth,vh->btv", h, w).log_softmax(-1), y)


@spelling()
def head_einsum_vocabulary_first(h, w, y):
    return pick(torch.einsum("bth,vh->vbt", h, w).permute(1, 2, 0).log_softmax(-1), y)


@spelling()
def head_four_dimensional(h, w, y):
    groups = h.unsqueeze(1).expand(-1, 3, -1, -1)
    return pick(F.linear(groups, w).float().log_softmax(-1), y.unsqueeze(1).expand(-1, 3, -1))


@spelling(lambda dtype: (padded(dtype)[0], normal(H, V, seed=2, scale=0.4, grad=True, dtype=dtype), ids(B, T)))
def head_weight_stored_features_first(h, w, y):
    return pick(torch.log_softmax(h @ w, dim=-1), y)


@spelling()
def head_bmm_of_an_expanded_weight(h, w, y):
    return pick(torch.bmm(h, w.t().expand(h.shape[0], -1, -1)).log_softmax(-1), y)


@spelling(with_more(packed, lambda dtype: normal(V, seed=5, grad=True, dtype=dtype)))
def head_addmm_with_factors(h, w, y, bias):
    return pick(torch.addmm(bias, h, w.t(), beta=0.5, alpha=2.0).log_softmax(-1), y)


@spelling(with_more(padded, lambda dtype: normal(V, seed=5, grad=True, dtype=dtype)))
def head_bias_added_later(h, w, y, bias):
    return pick((h @ w.t() + bias).float().log_softmax(-1), y)


@spelling()
def head_normalised_features(h, w, y):
    normed = F.rms_norm(h.float(), (H,)).to(h.dtype)
    return pick(F.linear(normed, w).log_softmax(-1), y)


@spelling()
def head_cosine(h, w, y):
    logits = F.linear(F.normalize(h.float(), dim=-1), F.normalize(w.float(), dim=-1)) * 8.0
    return pick(logits.log_softmax(-1), y)


@spelling(
    with_more(
        padded, lambda d: normal(3, H, seed=6, grad=True, dtype=d), lambda d: normal(V, 3, seed=7, grad=True, dtype=d)
    )
)
def head_low_rank_update(h, w, y, a, b):
    return pick((F.linear(h, w) + 2.0 * F.linear(F.linear(h, a), b)).float().log_softmax(-1), y)


@spelling(
    with_more(
        padded, lambda d: normal(3, H, seed=6, grad=True, dtype=d), lambda d: normal(V, 3, seed=7, grad=True, dtype=d)
    )
)
def head_low_rank_merged(h, w, y, a, b):
    return pick(F.linear(h, w + 0.5 * b @ a).log_softmax(-1), y)


@spelling(with_more(padded, lambda d: normal(H, H, seed=6, scale=0.3, grad=True, dtype=d)))
def head_behind_a_layer(h, w, y, inner):
    return pick(F.linear(F.silu(F.linear(h, inner)) + h, w).float().log_softmax(-1), y)


@spelling()
def head_under_autocast(h, w, y):
    with torch.autocast("cpu", torch.bfloat16):
        return pick(F.linear(h, w).float().log_softmax(-1), y)


@spelling()
def head_padded_vocabulary(h, w, y):
    real = 37
    return pick(F.linear(h, w)[..., :real].float().log_softmax(-1), y.clamp(max=real - 1))


@spelling()
def head_padded_vocabulary_masked(h, w, y):
    logits = F.linear(h, w).float()
    unused = torch.arange(V, device=h.device) >= 37
    return pick(logits.masked_fill(unused, torch.finfo(torch.float32).min).log_softmax(-1), y.clamp(max=36))


@spelling()
def head_two_halves_of_the_vocabulary(h, w, y):
    logits = torch.cat([F.linear(h, w[:20]), F.linear(h, w[20:])], dim=-1).float()
    return pick(logits.log_softmax(-1), y)


# ---------------------------------------------------------------- logits on the way


@spelling(with_more(padded, lambda dtype: torch.linspace(0.5, 1.5, B * T).view(B, T)))
def temperature_per_token_clamped(h, w, y, temperature):
    logits = F.linear(h, w).float() / temperature.clamp(min=1e-6)[..., None]
    return pick(logits.log_softmax(-1), y)


@spelling(with_more(padded, lambda dtype: torch.tensor([0.7, 1.3])))
def temperature_per_sequence(h, w, y, temperature):
    logits = F.linear(h, w)
    return pick((logits / temperature.view(-1, 1, 1).to(logits.dtype)).log_softmax(-1), y)


@spelling()
def temperature_in_place_on_all(h, w, y):
    logits = F.linear(h, w)
    logits.div_(0.8)
    return pick(logits[:, :-1].float().log_softmax(-1), y[:, 1:])


@spelling()
def softcap_then_temperature(h, w, y):
    logits = 5.0 * torch.tanh(F.linear(h, w) / 5.0)
    return pick((logits / 0.9).float().log_softmax(-1), y)


@spelling(with_more(padded, lambda dtype: normal(V, seed=8)))
def vocabulary_bias_mask(h, w, y, bias):
    blocked = bias > 1.0
    logits = F.linear(h, w).float().masked_fill(blocked, float("-inf"))
    value = pick(logits.log_softmax(-1), y)
    return torch.where(value.isinf(), 0.0, value)


@spelling(with_more(padded, lambda dtype: ids(B, T, seed=9).remainder(2).bool()))
def grammar_mask_per_token(h, w, y, keep):
    logits = F.linear(h, w).float()
    odd = torch.arange(V, device=h.device).remainder(2).bool()
    allowed = keep[..., None] | odd | (torch.arange(V, device=h.device) == y[..., None])
    return pick(torch.where(allowed, logits, -1e9).log_softmax(-1), y)


@spelling()
def nan_guard(h, w, y):
    return pick(torch.nan_to_num(F.linear(h, w).float()).clamp(-30, 30).log_softmax(-1), y)


@spelling()
def shifted_by_the_detached_maximum(h, w, y):
    logits = F.linear(h, w).float()
    logits = logits - logits.amax(-1, keepdim=True).detach()
    return pick(logits, y) - logits.exp().sum(-1).log()


# ---------------------------------------------------------------- log-probability


@spelling()
def softmax_with_dtype_argument(h, w, y):
    return pick(F.log_softmax(F.linear(h, w), dim=-1, dtype=torch.float32), y)


@spelling()
def log_of_softmax_with_epsilon(h, w, y):
    return torch.log(pick(F.linear(h, w).softmax(-1), y) + 1e-8)


@spelling()
def take_along_dim(h, w, y):
    return torch.take_along_dim(F.linear(h, w).log_softmax(-1), y[..., None], dim=-1)[..., 0]


@spelling(packed)
def advanced_index(h, w, y):
    log_probs = (h @ w.t()).float().log_softmax(-1)
    return log_probs[torch.arange(len(y), device=y.device), y]


@spelling()
def advanced_index_of_three(h, w, y):
    log_probs = F.linear(h, w).log_softmax(-1)
    rows = torch.arange(h.shape[0], device=h.device)[:, None]
    return log_probs[rows, torch.arange(h.shape[1], device=h.device), y]


@spelling()
def compared_with_every_word(h, w, y):
    hit = torch.arange(V, device=y.device) == y[..., None]
    return torch.where(hit, F.linear(h, w).float().log_softmax(-1), 0.0).sum(-1)


@spelling()
def logsumexp_keepdim(h, w, y):
    logits = F.linear(h, w).float()
    return (logits.gather(-1, y[..., None]) - logits.logsumexp(-1, keepdim=True)).squeeze(-1)


@spelling(packed)
def labels_in_int32(h, w, y):
    return pick((h @ w.t()).log_softmax(-1), y.int().long())


@spelling()
def class_dimension_in_the_middle(h, w, y):
    return -F.cross_entropy(F.linear(h, w).transpose(1, 2), y, reduction="none")


@spelling(ignoring)
def cross_entropy_mean(h, w, y):
    return F.cross_entropy((h @ w.t()).float(), y)


@spelling(ignoring)
def cross_entropy_sum_smoothed(h, w, y):
    return F.cross_entropy((h @ w.t()).float(), y, reduction="sum", label_smoothing=0.1)


@spelling(with_more(packed, lambda dtype: torch.linspace(0.2, 2.0, V).to(dtype)))
def cross_entropy_class_weights(h, w, y, classes):
    return F.cross_entropy(h @ w.t(), y, weight=classes)


@spelling(ignoring)
def nll_loss_of_log_softmax(h, w, y):
    return F.nll_loss((h @ w.t()).float().log_softmax(-1), y, ignore_index=-100, reduction="none")


@spelling()
def cross_entropy_of_soft_targets(h, w, y):
    soft = F.one_hot(y, V).float() * 0.9 + 0.1 / V
    return F.cross_entropy(F.linear(h, w).float().flatten(0, 1), soft.flatten(0, 1))


@spelling()
def bernoulli_of_the_label(h, w, y):
    p = pick(F.linear(h, w).float().softmax(-1), y)
    return p.log(), torch.log1p(-p)


# ---------------------------------------------------------------- more than the log-probability


@spelling()
def with_z_loss(h, w, y):
    logits = F.linear(h, w).float()
    lse = logits.logsumexp(-1)
    return (lse - pick(logits, y) + 1e-2 * lse.square()).mean()


@spelling()
def focal(h, w, y):
    log_probs = pick(F.linear(h, w).float().log_softmax(-1), y)
    return (-((1 - log_probs.exp()) ** 2) * log_probs).mean()


@spelling()
def with_metrics(h, w, y):
    logits = F.linear(h, w).float()
    log_probs = pick(logits.log_softmax(-1), y)
    with torch.no_grad():
        best = logits.argmax(-1)
        top = logits.topk(3, dim=-1).indices
        in_top = (top == y[..., None]).any(-1)
    return log_probs, best == y, in_top, logits.detach().max(-1).values


@spelling()
def rank_of_the_label(h, w, y):
    logits = F.linear(h, w).float()
    chosen = pick(logits, y)
    return chosen - logits.logsumexp(-1), (logits.detach() > chosen.detach()[..., None]).sum(-1)


@spelling()
def top_two_margin(h, w, y):
    top = F.linear(h, w).float().topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


@spelling()
def entropy_of_probabilities(h, w, y):
    p = F.linear(h, w).float().softmax(-1)
    return -torch.xlogy(p, p).sum(-1), -torch.special.entr(p).sum(-1)


@spelling()
def tsallis_and_renyi(h, w, y):
    p = F.linear(h, w).float().softmax(-1)
    collision = p.square().sum(-1)
    return 1 - collision, -collision.log()


@spelling()
def variance_of_the_logits(h, w, y):
    logits = F.linear(h, w).float()
    p = logits.softmax(-1)
    mean = (p * logits).sum(-1, keepdim=True)
    return (p * (logits - mean).square()).sum(-1)


@spelling(
    with_more(padded, lambda d: normal(B, T, H, seed=11, dtype=d), lambda d: normal(V, H, seed=12, scale=0.4, dtype=d))
)
def kl_to_a_second_head(h, w, y, ref_h, ref_w):
    mine = F.linear(h, w).float().log_softmax(-1)
    with torch.no_grad():
        theirs = F.linear(ref_h, ref_w).float().log_softmax(-1)
    return (mine.exp() * (mine - theirs)).sum(-1), F.kl_div(mine, theirs, log_target=True, reduction="none").sum(-1)


@spelling(
    with_more(padded, lambda d: normal(B, T, H, seed=11, dtype=d), lambda d: normal(V, H, seed=12, scale=0.4, dtype=d))
)
def jensen_shannon_distillation(h, w, y, ref_h, ref_w):
    mine, theirs = F.linear(h, w).float().softmax(-1), F.linear(ref_h, ref_w).float().softmax(-1)
    mix = (0.5 * (mine + theirs)).log()
    return 0.5 * ((mine * (mine.log() - mix)).sum(-1) + (theirs * (theirs.log() - mix)).sum(-1))


@spelling(with_more(padded, lambda d: normal(B, T, H, seed=11, dtype=d)))
def one_head_for_two_hiddens(h, w, y, other):
    new, old = (pick(F.linear(x, w).float().log_softmax(-1), y) for x in (h, other))
    return (torch.exp(new - old.detach()) * old.detach()).mean()


@spelling()
def two_temperatures_of_one_head(h, w, y):
    logits = F.linear(h, w).float()
    return pick(logits.log_softmax(-1), y), pick((logits / 0.6).log_softmax(-1), y)


# ---------------------------------------------------------------- rows


@spelling()
def completion_slice_of_the_hidden(h, w, y):
    return pick(F.linear(h[:, 2:-1].contiguous(), w).float().log_softmax(-1), y[:, 3:])


@spelling(packed)
def rows_by_index_select(h, w, y):
    rows = torch.tensor([0, 3, 4, 9, 12], device=h.device)
    return pick((h.index_select(0, rows) @ w.t()).log_softmax(-1), y.index_select(0, rows))


@spelling(packed)
def logits_by_row_index(h, w, y):
    rows = torch.tensor([0, 3, 4, 9, 12], device=h.device)
    return pick((h @ w.t()).float()[rows].log_softmax(-1), y[rows])


@spelling(packed)
def every_second_row(h, w, y):
    return pick((h @ w.t()).float()[::2].log_softmax(-1), y[::2])


@spelling()
def rows_flipped_and_stacked(h, w, y):
    logits = F.linear(h, w).float()
    turned = torch.stack([logits[1], logits[0]])
    return pick(turned.log_softmax(-1), y)


@spelling()
def unflattened(h, w, y):
    logits = F.linear(h.flatten(0, 1), w).unflatten(0, (h.shape[0], h.shape[1])).float()
    return pick(logits.log_softmax(-1), y)


@spelling()
def vectorised_over_the_batch(h, w, y):
    one = lambda x, t: pick(F.linear(x, w).float().log_softmax(-1), t)  # noqa: E731
    return torch.vmap(one)(h, y)


@spelling(packed)
def unequal_chunk_loop(h, w, y):
    parts = [pick((a @ w.t()).float().log_softmax(-1), b) for a, b in zip(h.split(4), y.split(4), strict=True)]
    return torch.cat(parts)


@spelling(packed)
def one_row_at_a_time(h, w, y):
    logits = h @ w.t()
    return torch.stack([row.log_softmax(-1).gather(-1, label.view(1)).squeeze(-1) for row, label in zip(logits, y)])  # noqa: B905


@spelling()
def checkpointed(h, w, y):
    return checkpoint(lambda a, b: pick(F.linear(a, b).float().log_softmax(-1), y), h, w, use_reentrant=False)


@spelling()
def mean_over_nested_functions(h, w, y):
    def logits() -> Tensor:
        return F.linear(h, w).float()

    def loss(values: Tensor) -> Tensor:
        return -pick(values.log_softmax(-1), y)

    return loss(logits()).mean(dim=1).sum()
