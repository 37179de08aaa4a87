"""The policy loss in plain torch and float64, on anything: what the kernels of mmpack::policy_loss are to compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mmpack.losses.aggregate import at_least_one
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import LOG_RATIO_BOUND, k3, kl_divergence
from mmpack.losses.policy.call import METRICS, Columns, Options
from mmpack.losses.samples import per_token, sample_lengths, sample_mean


def policy_loss(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], METRICS [10] and the derivatives [1 or 2, N] of mmpack::policy_loss."""
    cu_loss, count = columns.cu_loss, len(columns.logprobs)
    lp = columns.logprobs.double()
    old = lp if columns.old_logprobs is None else columns.old_logprobs.double()

    adv = columns.advantages.double()
    if len(adv) == len(cu_loss) - 1:
        adv = per_token(adv, cu_loss, count)
    ratios = Ratios(lp, lp - old, adv[:count], cu_loss, options)
    terms, slopes, importance, clipped = SURROGATES[options.surrogate](ratios)
    logged = {
        "ratio": importance,
        "clip_fraction": clipped,
        "kl_old": k3(old - lp),
        "dual_clip_fraction": _cut_again(ratios, importance),
    }
    if options.correction is not None and columns.rollout_logprobs is not None:
        importance, cut = correction_weights(
            old,
            columns.rollout_logprobs,
            cu_loss,
            options.correction,
            options.correction_level,
            options.correction_low,
            options.correction_high,
        )
        terms, slopes = terms * importance, slopes * importance
        logged |= {"correction": importance, "correction_fraction": cut}
    if columns.ref_logprobs is not None:
        kl = kl_divergence(lp, columns.ref_logprobs, options.kl_kind)
        logged["kl_ref"] = kl
        if options.kl_coef:
            terms = terms + options.kl_coef * kl
            slopes = slopes + options.kl_coef * (lp - columns.ref_logprobs.double())
    if columns.entropy is not None:
        logged["entropy"] = columns.entropy
        if options.entropy_coef:
            terms = terms - options.entropy_coef * columns.entropy.double()

    weight = torch.ones_like(lp) * options.scale  # of a token's term in the loss
    if options.sample_mean:
        weight = weight / per_token(sample_lengths(cu_loss), cu_loss, count)
    if columns.total is not None:
        weight = weight / at_least_one(columns.total)

    derivatives = [weight * slopes]
    if options.entropy_coef:
        derivatives.append(-options.entropy_coef * weight)
    dtype = torch.promote_types(columns.logprobs.dtype, torch.float32)
    loss = (terms * weight).sum().float()
    return loss, _metrics(logged, importance, count), torch.stack(derivatives).to(dtype)


class Ratios(NamedTuple):
    """What surrogates are made of, [N] float64 each."""

    logprobs: Tensor
    log_ratio: Tensor  # to the old policy
    advantages: Tensor
    cu_loss: Tensor  # [B+1]
    options: Options


# Of each token, [N]: the terms, their derivatives to the logprobs, the ratio, and whether it is clipped.
Surrogate = tuple[Tensor, Tensor, Tensor, Tensor]


def _clip(of: Ratios) -> Surrogate:
    """The ratio of each token, cut where that lowers the gain (PPO)."""
    return _minimum(of, of.log_ratio)


def _gspo(of: Ratios) -> Surrogate:
    """The same with the sample's mean ratio."""
    mean = sample_mean(of.log_ratio, of.cu_loss)
    return _minimum(of, per_token(mean, of.cu_loss, len(of.log_ratio)))


def _minimum(of: Ratios, exponent: Tensor) -> Surrogate:
    adv, options = of.advantages, of.options
    bounded = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    low, high = options.ratio_low, options.ratio_high
    clipped = ((ratio < low) & (adv < 0)) | ((ratio > high) & (adv > 0))
    terms = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    cut_again = _cut_again(of, ratio)
    terms = torch.where(cut_again, -options.dual_clip * adv, terms)
    slopes = torch.where(clipped | cut_again | (bounded != exponent), 0.0, -ratio * adv)
    return terms, slopes, ratio, clipped


def _cut_again(of: Ratios, ratio: Tensor) -> Tensor:
    """Where dual_clip cuts, [N] bool."""
    return (ratio > of.options.dual_clip) & (of.advantages < 0)


def _cispo(of: Ratios) -> Surrogate:
    """The clipped ratio as the weight of the token's logprob."""
    ratio = of.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    low, high = of.options.ratio_low, of.options.ratio_high
    slopes = -ratio.clamp(low, high) * of.advantages
    return slopes * of.logprobs, slopes, ratio, (ratio < low) | (ratio > high)


def _gmpo(of: Ratios) -> Surrogate:
    """The geometric mean of the sample's ratios, each cut where that lowers the gain."""
    log_ratio, adv, low, high = (
        of.log_ratio,
        of.advantages,
        of.options.ratio_low,
        of.options.ratio_high,
    )
    clipped = ((log_ratio < low) & (adv < 0)) | ((log_ratio > high) & (adv > 0))
    within = torch.where(clipped, log_ratio.clamp(low, high), log_ratio)
    exponent = per_token(sample_mean(within, of.cu_loss), of.cu_loss, len(within))
    bounded = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    terms = -ratio * adv
    return terms, torch.where(clipped | (bounded != exponent), 0.0, terms), ratio, clipped


SURROGATES: dict[str, Callable[[Ratios], Surrogate]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "gmpo": _gmpo,
}


def _metrics(logged: dict[str, Tensor], importance: Tensor, count: int) -> Tensor:
    """METRICS [10] float32: means over the tokens, 0 for what is not logged."""
    means = {name: x.double().sum() / max(count, 1) for name, x in logged.items()}
    squares = (importance.square().sum() * count).clamp(min=torch.finfo(torch.float64).tiny)
    means["ess"] = importance.sum().square() / squares
    means["tokens"] = torch.full_like(means["ratio"], count)
    zero = torch.zeros_like(means["ratio"])
    return torch.stack([means.get(name, zero) for name in METRICS]).float()
