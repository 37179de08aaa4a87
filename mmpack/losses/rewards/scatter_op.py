"""The op mmpack::scatter_rewards: one number per sample, [B], to its loss tokens, [N] float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.losses.rewards import SCATTER_REWARDS
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
