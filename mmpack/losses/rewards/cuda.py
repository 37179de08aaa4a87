"""mmpack::scatter_rewards by csrc/rewards.cu."""

from __future__ import annotations

from torch import Tensor

from mmpack.ops.csrc import index, numbers
from mmpack.ops.native import native_ops

# The numbers of csrc/ops.h.
PLACES = {"last": 0, "all": 1, "mean": 2}


def scatter_rewards(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    """Arguments and results of mmpack::scatter_rewards."""
    scattered: Tensor = native_ops().scatter_rewards.default(
        numbers(rewards), index(cu_loss), count, weight, PLACES[at]
    )
    return scattered
