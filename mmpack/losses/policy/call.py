"""One call of the policy loss as two records: the tensors that it reads, and what it does with them.

Every implementation takes (Columns, Options). The schema of mmpack::policy_loss is made of their fields, in this order.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmpack.losses.correction import Correction, CorrectionLevel
from mmpack.losses.kl import KLKind

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


class Columns(NamedTuple):
    """Tensors on one device, [N] floats where nothing else is said."""

    logprobs: Tensor
    entropy: Tensor | None
    advantages: Tensor  # [B], one per sample, else one per token and at least N of them
    cu_loss: Tensor  # [B+1] int32 or int64
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    total: Tensor | None  # one number; the sum is divided by max(total, 1)


class Options(NamedTuple):
    """Numbers and names. The loss is the sum of the terms, or of the samples' means, times scale / max(total, 1)."""

    scale: float
    sample_mean: bool
    surrogate: str  # of the kind: the name of its function in variants.py
    ratio_low: float  # of the ratio, or of its logarithm
    ratio_high: float
    dual_clip: float  # infinite: none
    kl_kind: KLKind
    kl_coef: float
    entropy_coef: float
    correction: Correction | None
    correction_level: CorrectionLevel
    correction_low: float
    correction_high: float


def outputs_of(options: Options) -> int:
    """Rows of the derivatives: to the logprobs, and with an entropy_coef to the entropy."""
    return 2 if options.entropy_coef else 1
