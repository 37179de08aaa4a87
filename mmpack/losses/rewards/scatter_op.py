"""The ops mmpack::scatter_rewards (numbers [B] of samples) and mmpack::scatter_scores (a table): to loss tokens [N]."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.losses.rewards import SCATTER_REWARDS, SCATTER_SCORES
from mmpack.ops.custom_op import by_backend, define_op
from mmpack.ops.records import Size


def _fake(rewards: Tensor, cu_loss: Tensor, count: Size, weight: float, at: str) -> Tensor:
    return cu_loss.new_empty(count, dtype=torch.float32)


scatter_op = define_op("scatter_rewards", by_backend(SCATTER_REWARDS, "scatter_rewards"), _fake)


def _fake_table(
    values: Tensor,
    index: Tensor,
    factors: Tensor | None,
    offsets: Tensor,
    edges: Tensor,
    count: Size,
    most: int,
) -> Tensor:
    return values.new_empty(count, dtype=torch.float32)


# values [K] float64; index, factors [terms] (None: 1); offsets, edges [pieces+1] int64; most: terms of one piece.
table_op = define_op("scatter_scores", by_backend(SCATTER_SCORES, "scatter_scores"), _fake_table)
