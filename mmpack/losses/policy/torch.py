"""The policy loss in plain torch and float64, on anything: what the kernels of mmpack::policy_loss are to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.losses.aggregate import at_least_one
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import LOG_RATIO_BOUND, k3, kl_divergence
from mmpack.losses.samples import per_token, sample_lengths
from mmpack.losses.samples import sample_mean as mean_of_samples

METRICS = (
    "tokens",
    "ratio",
    "clip_fraction",
    "kl_old",
    "ess",
    "correction",
    "correction_fraction",
    "kl_ref",
    "entropy",
    "dual_clip_fraction",
)


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    advantages: Tensor,
    cu_loss: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    total: Tensor | None,
    scale: float,
    sample_mean: bool,
    kind: Any,
    ratio_low: float,
    ratio_high: float,
    dual_clip: float,
    kl_kind: Any,
    kl_coef: float,
    entropy_coef: float,
    correction: Any,
    correction_level: Any,
    correction_low: float,
    correction_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results of mmpack::policy_loss."""
    count, num_samples = len(logprobs), len(cu_loss) - 1
    lp = logprobs.double()
    old = lp if old_logprobs is None else old_logprobs.double()
    adv = advantages.double()
    if len(adv) == num_samples:
        adv = per_token(adv, cu_loss, count)

    log_ratio = lp - old
    exponent = log_ratio
    if kind == "gspo":
        exponent = per_token(mean_of_samples(log_ratio, cu_loss), cu_loss, count)
    bounded = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    within = ratio.clamp(ratio_low, ratio_high)
    cut_again = (ratio > dual_clip) & (adv < 0)
    if kind == "cispo":
        clipped = (ratio < ratio_low) | (ratio > ratio_high)
        terms = -within * adv * lp
        slopes = -within * adv
    else:
        clipped = ((ratio < ratio_low) & (adv < 0)) | ((ratio > ratio_high) & (adv > 0))
        terms = -torch.minimum(ratio * adv, within * adv)
        terms = torch.where(cut_again, -dual_clip * adv, terms)
        slopes = torch.where(clipped | cut_again | (bounded != exponent), 0.0, -ratio * adv)

    logged = {
        "ratio": ratio,
        "clip_fraction": clipped,
        "kl_old": k3(-log_ratio),
        "dual_clip_fraction": cut_again,
    }
    importance = ratio
    if correction is not None and rollout_logprobs is not None:
        importance, cut = correction_weights(
            old,
            rollout_logprobs,
            cu_loss,
            correction,
            correction_level,
            correction_low,
            correction_high,
        )
        terms, slopes = terms * importance, slopes * importance
        logged |= {"correction": importance, "correction_fraction": cut}
    if ref_logprobs is not None:
        logged["kl_ref"] = kl_divergence(lp, ref_logprobs, kl_kind)
        if kl_coef:
            terms = terms + kl_coef * logged["kl_ref"]
            slopes = slopes + kl_coef * (lp - ref_logprobs.double())
    if entropy is not None:
        logged["entropy"] = entropy
        if entropy_coef:
            terms = terms - entropy_coef * entropy.double()

    # What one token's term weighs in the loss.
    weight = torch.ones_like(lp) * scale
    if sample_mean:
        weight = weight / per_token(sample_lengths(cu_loss), cu_loss, count)
    if total is not None:
        weight = weight / at_least_one(total)

    means = {name: x.double().sum() / max(count, 1) for name, x in logged.items()}
    squares = (importance.square().sum() * count).clamp(min=torch.finfo(torch.float64).tiny)
    means["ess"] = importance.sum().square() / squares
    means["tokens"] = torch.full_like(means["ratio"], count)
    zero = torch.zeros_like(means["ratio"])
    metrics = torch.stack([means.get(name, zero) for name in METRICS]).float()

    derivatives = [weight * slopes]
    if entropy_coef:
        derivatives.append(-entropy_coef * weight)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return (terms * weight).sum().float(), metrics, torch.stack(derivatives).to(dtype)
