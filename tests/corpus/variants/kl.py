"""KL estimators between the policy and stored reference log-probabilities."""

from __future__ import annotations

import torch

from tests.corpus.variants.common import _lp, _mm
from tests.corpus.variants.inputs import f_rl_ref
from tests.corpus.variants.registry import variant


@variant(
    "KL01", "loss", ["verl k1", "OpenRLHF k1", "slime k1", "SkyRL", "NeMo-RL", "ROLL", "EasyR1", "RLinf"], f_rl_ref
)
def kl01_k1(hidden, weight, labels, old, adv, mask, ref):
    """logp - ref."""
    return _mm(_lp(hidden, weight, labels) - ref, mask)


@variant("KL02", "loss", ["verl k2/mse", "OpenRLHF k2", "slime k2", "SkyRL", "NeMo-RL", "ROLL"], f_rl_ref)
def kl02_k2(hidden, weight, labels, old, adv, mask, ref):
    """0.5*(logp - ref)^2."""
    return _mm(0.5 * (_lp(hidden, weight, labels) - ref).square(), mask)


@variant(
    "KL03", "loss", ["TRL", "unsloth", "Liger", "OpenRLHF k3 (+-10 clamp)", "tiny-grpo", "ART", "Megatron-LM"], f_rl_ref
)
def kl03_k3(hidden, weight, labels, old, adv, mask, ref):
    """exp(ref-logp) - (ref-logp) - 1."""
    d = ref - _lp(hidden, weight, labels)
    return _mm(d.exp() - d - 1, mask)


@variant("KL05", "loss", ["verl abs", "SkyRL abs", "ROLL abs"], f_rl_ref)
def kl05_abs(hidden, weight, labels, old, adv, mask, ref):
    """|logp - ref|."""
    return _mm((_lp(hidden, weight, labels) - ref).abs(), mask)


@variant("KL07", "loss", ["slime use_unbiased_kl", "NeMo-RL", "TRL use_bias_correction_kl"], f_rl_ref)
def kl07_importance_weighted(hidden, weight, labels, old, adv, mask, ref):
    """exp(logp - old) * k3 (DeepSeek-V3.2 unbiased KL); NeMo-RL uses exp(logp - logp.detach())."""
    lp = _lp(hidden, weight, labels)
    d = ref - lp
    return _mm(torch.exp(lp - old) * (d.exp() - d - 1), mask)


@variant("KL08", "loss", ["open-instruct", "oat", "torchrl"], f_rl_ref)
def kl08_expm1(hidden, weight, labels, old, adv, mask, ref):
    """torch.expm1(-d) + d with d = (logp - ref).clamp(-40, 40); all estimators stacked then one selected."""
    d = (_lp(hidden, weight, labels) - ref).clamp(-40.0, 40.0)
    return _mm(torch.stack([d, d**2 / 2, torch.expm1(-d) + d])[2], mask)
