"""mmpack::policy_loss by csrc/policy_loss.cu."""

from __future__ import annotations

from torch import Tensor

from mmpack.ops.csrc import column, native_ops

# The numbers of csrc/ops.h.
KINDS = {"gspo": 1, "cispo": 2}
KL_KINDS = {"k1": 0, "k2": 1, "k3": 2}
CORRECTIONS = {None: 0, "tis": 1, "mis": 2}
LEVELS = {"token": 0, "sequence": 1, "geometric": 2}


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
    kind: str,
    ratio_low: float,
    ratio_high: float,
    dual_clip: float,
    kl_kind: str,
    kl_coef: float,
    entropy_coef: float,
    correction: str | None,
    correction_level: str,
    correction_low: float,
    correction_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results of mmpack::policy_loss."""
    results: tuple[Tensor, Tensor, Tensor] = native_ops().policy_loss.default(
        column(logprobs),
        column(entropy),
        column(advantages),
        column(cu_loss),
        column(old_logprobs),
        column(ref_logprobs),
        column(rollout_logprobs),
        column(total),
        scale,
        sample_mean,
        KINDS.get(kind, 0),
        ratio_low,
        ratio_high,
        dual_clip,
        KL_KINDS[kl_kind],
        kl_coef,
        entropy_coef,
        CORRECTIONS[correction],
        LEVELS[correction_level],
        correction_low,
        correction_high,
    )
    return results
