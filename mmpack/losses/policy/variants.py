"""What each kind of policy loss decides: a row of VARIANTS, and how it bounds the ratio, in plain torch and float64.

A new kind is a name in Kind, its row and its function here, a branch under the function's name in triton.py, its
formula in tests/support/policy_oracle.py and a row of the table in docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmpack.losses.kl import LOG_RATIO_BOUND
from mmpack.losses.policy.call import Options
from mmpack.losses.samples import per_token, sample_mean

Kind = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo", "gmpo"]


class Ratios(NamedTuple):
    """What surrogates are made of, [N] float64 each."""

    logprobs: Tensor
    log_ratio: Tensor  # to the old policy
    advantages: Tensor
    cu_loss: Tensor  # [B+1]
    options: Options


# Per token, [N]: the terms, their derivatives to the logprobs, the ratio, and whether it is clipped.
Surrogate = tuple[Tensor, Tensor, Tensor, Tensor]


def clip(of: Ratios) -> Surrogate:
    """The ratio of each token, cut where that lowers the gain (PPO)."""
    return _minimum(of, of.log_ratio)


def gspo(of: Ratios) -> Surrogate:
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
    again = cut_again(of, ratio)
    terms = torch.where(again, -options.dual_clip * adv, terms)
    slopes = torch.where(clipped | again | (bounded != exponent), 0.0, -ratio * adv)
    return terms, slopes, ratio, clipped


def cut_again(of: Ratios, ratio: Tensor) -> Tensor:
    """Where dual_clip cuts, [N] bool."""
    return (ratio > of.options.dual_clip) & (of.advantages < 0)


def cispo(of: Ratios) -> Surrogate:
    """The clipped ratio as the weight of the token's logprob."""
    ratio = of.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    low, high = of.options.ratio_low, of.options.ratio_high
    slopes = -ratio.clamp(low, high) * of.advantages
    return slopes * of.logprobs, slopes, ratio, (ratio < low) | (ratio > high)


def gmpo(of: Ratios) -> Surrogate:
    """The geometric mean of the sample's ratios, each cut where that lowers the gain."""
    log_ratio, adv = of.log_ratio, of.advantages
    low, high = of.options.ratio_low, of.options.ratio_high
    clipped = ((log_ratio < low) & (adv < 0)) | ((log_ratio > high) & (adv > 0))
    within = torch.where(clipped, log_ratio.clamp(low, high), log_ratio)
    exponent = per_token(sample_mean(within, of.cu_loss), of.cu_loss, len(within))
    bounded = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    terms = -ratio * adv
    return terms, torch.where(clipped | (bounded != exponent), 0.0, terms), ratio, clipped


@dataclass(frozen=True)
class Variant:
    """One kind."""

    surrogate: Callable[[Ratios], Surrogate]  # its name is the kernel's KIND
    clip: tuple[float, float]  # clip_low, clip_high
    of_sample: bool = False  # the ratio is of the whole sample
    of_log: bool = False  # the clip bounds the ratio's logarithm: [-clip_low, clip_high]
    per_sample: bool = False  # advantages are of samples only
    # options, with why and what to do instead
    refuses: Mapping[str, str] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    "grpo": Variant(clip, (0.2, 0.2)),
    "dapo": Variant(clip, (0.2, 0.28)),  # arXiv 2503.14476 section 4.1
    "dr_grpo": Variant(clip, (0.2, 0.2)),
    "gspo": Variant(gspo, (3e-4, 4e-4), of_sample=True),  # arXiv 2507.18071 section 5.1
    "cispo": Variant(
        cispo,
        # No lower bound, arXiv 2506.13585 section 3.1; weights up to 5, as TRL recommends for arXiv 2510.13786.
        (1.0, 4.0),
        refuses={
            "dual_clip": "has no minimum to bound. Fix: leave it out; clip_high bounds the weight"
        },
    ),
    "ppo": Variant(clip, (0.2, 0.2)),
    "gmpo": Variant(
        gmpo,
        (0.4, 0.4),  # arXiv 2507.20673 section 4.1
        of_sample=True,
        of_log=True,
        per_sample=True,
        refuses={"dual_clip": "bounds a sample's ratio, not a token's. Fix: leave it out"},
    ),
}
SURROGATES = {row.surrogate.__name__: row for row in VARIANTS.values()}
