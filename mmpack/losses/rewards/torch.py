"""Numbers of samples to their loss tokens in plain PyTorch, on anything: what the kernels are to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.segments import segment_ids


def scatter_rewards(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    """weight · rewards [B] of any dtype at the `last` token of each sample, in full at `all`, or spread (`mean`)."""
    segment = segment_ids(cu_loss, count)
    stop = cu_loss[1:][segment]
    values = rewards.double()[segment] * weight
    if at == "last":
        is_last = torch.arange(1, count + 1, device=cu_loss.device) == stop
        values = torch.where(is_last, values, 0.0)
    elif at == "mean":
        values = values / (stop - cu_loss[segment])
    return values.float()
