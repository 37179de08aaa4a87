"""mmpack::policy_loss by csrc/policy_loss.cu."""

from __future__ import annotations

from torch import Tensor

from mmpack.losses.policy.call import Columns, Options
from mmpack.ops.csrc import column
from mmpack.ops.native import native_ops

# The numbers of csrc/ops.h.
KINDS = {"gspo": 1, "cispo": 2}
KL_KINDS = {"k1": 0, "k2": 1, "k3": 2}
CORRECTIONS = {None: 0, "tis": 1, "mis": 2}
LEVELS = {"token": 0, "sequence": 1, "geometric": 2}


def policy_loss(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], METRICS [10] and the derivatives [1 or 2, N] of mmpack::policy_loss."""
    o = options
    results: tuple[Tensor, Tensor, Tensor] = native_ops().policy_loss.default(
        *map(column, columns),
        o.scale,
        o.sample_mean,
        KINDS.get(o.kind, 0),
        o.ratio_low,
        o.ratio_high,
        o.dual_clip,
        KL_KINDS[o.kl_kind],
        o.kl_coef,
        o.entropy_coef,
        CORRECTIONS[o.correction],
        LEVELS[o.correction_level],
        o.correction_low,
        o.correction_high,
    )
    return results
