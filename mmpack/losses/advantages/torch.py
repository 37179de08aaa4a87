"""group_advantages in plain PyTorch and float64, on anything: what the kernels are to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.segments import keyed_sum


def group_advantages(
    rewards: Tensor, group_index: Tensor, num_tokens: Tensor | None, kind: str, eps: float
) -> Tensor:
    """Arguments and results of mmpack::group_advantages."""
    r = rewards.double()
    if kind == "grpo":
        return standardised(r, group_index, eps).float()
    size = keyed_sum(torch.ones_like(r), group_index)
    mean = keyed_sum(r, group_index) / size
    centred = r - mean

    if kind == "dr_grpo":
        return centred.float()
    if kind == "rloo":
        return (centred * size / (size - 1).clamp(min=1.0)).float()
    if kind == "lite_ppo":
        return scaled(centred, spread(r, torch.ones_like(r))[1], eps).float()
    baselined = torch.where(size > 1, centred, r)
    weights = torch.ones_like(r) if num_tokens is None else num_tokens.double()
    return scaled(*spread(baselined, weights), eps).float()


def spread(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Distances [B] of values from their mean, and their variance; value b counts weights[b] times."""
    total = weights.sum()
    centred = values - (weights * values).sum() / total.clamp(min=1.0)
    return centred, (weights * centred.square()).sum() / (total - 1).clamp(min=1.0)


def scaled(centred: Tensor, variance: Tensor, eps: float) -> Tensor:
    std = variance.sqrt()
    return torch.where(std == 0, 0.0, centred / (std + eps))


def standardised(rewards: Tensor, group_index: Tensor, eps: float) -> Tensor:
    """(r - mean) / (std + eps) within groups, [B] float64: `grpo` before it is rounded."""
    size = keyed_sum(torch.ones_like(rewards), group_index)
    centred = rewards - keyed_sum(rewards, group_index) / size
    variance = keyed_sum(centred.square(), group_index) / (size - 1).clamp(min=1.0)
    return scaled(centred, variance, eps)
