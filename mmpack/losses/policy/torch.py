"""The policy loss in plain torch and float64, on anything: what the kernels of mmpack::policy_loss are to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.losses.aggregate import at_least_one
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import k3, kl_divergence
from mmpack.losses.policy.call import METRICS, Columns, Options
from mmpack.losses.policy.variants import SURROGATES, Ratios, cut_again
from mmpack.losses.samples import per_token, sample_lengths


def policy_loss(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], METRICS [10] and the derivatives [1 or 2, N] of mmpack::policy_loss."""
    cu_loss, count = columns.cu_loss, len(columns.logprobs)
    lp = columns.logprobs.double()
    old = lp if columns.old_logprobs is None else columns.old_logprobs.double()

    adv = columns.advantages.double()
    if len(adv) == len(cu_loss) - 1:
        adv = per_token(adv, cu_loss, count)
    ratios = Ratios(lp, lp - old, adv[:count], cu_loss, options)
    terms, slopes, importance, clipped = SURROGATES[options.surrogate].surrogate(ratios)
    logged = {
        "ratio": importance,
        "clip_fraction": clipped,
        "kl_old": k3(old - lp),
        "dual_clip_fraction": cut_again(ratios, importance),
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


def _metrics(logged: dict[str, Tensor], importance: Tensor, count: int) -> Tensor:
    """METRICS [10] float32: means over the tokens, 0 for what is not logged."""
    means = {name: x.double().sum() / max(count, 1) for name, x in logged.items()}
    squares = (importance.square().sum() * count).clamp(min=torch.finfo(torch.float64).tiny)
    means["ess"] = importance.sum().square() / squares
    means["tokens"] = torch.full_like(means["ratio"], count)
    zero = torch.zeros_like(means["ratio"])
    return torch.stack([means.get(name, zero) for name in METRICS]).float()
