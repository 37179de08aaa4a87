"""The ops mmpack::scatter_rewards (numbers [B] of samples) and mmpack::scatter_scores (a table): to loss tokens [N]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.losses.rewards import SCATTER_REWARDS, SCATTER_SCORES
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import define_op


def _run(rewards: Tensor, cu_loss: Tensor, *rest: Any) -> Tensor:
    module = implementation(SCATTER_REWARDS, cu_loss.device)
    scattered: Tensor = module.scatter_rewards(rewards, cu_loss, *rest)
    return scattered


def _fake(rewards: Tensor, cu_loss: Tensor, count: int, *_: Any) -> Tensor:
    return cu_loss.new_empty(count, dtype=torch.float32)


scatter_op = define_op(
    "scatter_rewards(Tensor rewards, Tensor cu_loss, SymInt count, float weight, str at) -> Tensor",
    _run,
    _fake,
)


def _run_table(values: Tensor, index: Tensor, *rest: Any) -> Tensor:
    module = implementation(SCATTER_SCORES, index.device)
    scattered: Tensor = module.scatter_scores(values, index, *rest)
    return scattered


def _fake_table(
    values: Tensor,
    index: Tensor,
    factors: Tensor | None,
    offsets: Tensor,
    edges: Tensor,
    count: int,
    most: int,
) -> Tensor:
    return values.new_empty(count, dtype=torch.float32)


# values [K] float64; index, factors [terms] (None: 1); offsets, edges [pieces+1] int64; most: terms of one piece.
table_op = define_op(
    "scatter_scores(Tensor values, Tensor index, Tensor? factors, Tensor offsets, Tensor edges, SymInt count, "
    "int most) -> Tensor",
    _run_table,
    _fake_table,
)
