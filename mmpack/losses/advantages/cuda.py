"""mmpack::group_advantages by csrc/rewards.cu."""

from __future__ import annotations

from torch import Tensor

from mmpack.ops.csrc import index, numbers
from mmpack.ops.native import native_ops

# The numbers of csrc/ops.h.
KINDS = {"grpo": 0, "rloo": 1, "dr_grpo": 2, "lite_ppo": 3, "reinforce_pp": 4}


def group_advantages(
    rewards: Tensor, group_index: Tensor, tokens: Tensor | None, kind: str, eps: float
) -> Tensor:
    """Arguments and results of mmpack::group_advantages."""
    weights = None if tokens is None else tokens.double().contiguous()
    advantages: Tensor = native_ops().group_advantages.default(
        numbers(rewards), index(group_index), weights, KINDS[kind], eps
    )
    return advantages
