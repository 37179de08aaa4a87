"""The op mmpack::scatter_rewards: one number a sample, [B], to its loss tokens, [N] float32."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.backend import choose
from mmpack.ops.custom_op import define_op
from mmpack.ops.segments import segment_ids


def scatter_torch(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
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


def _run(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    backend = choose("scatter_rewards", cu_loss.device)
    if backend == "torch":
        return scatter_torch(rewards, cu_loss, count, weight, at)
    if backend == "cuda":
        from mmpack.ops import native

        return native.scatter_rewards(rewards, cu_loss, count, weight, at)
    from mmpack.losses.rewards.triton import scatter_rewards

    return scatter_rewards(rewards, cu_loss, count, weight, at)


def _fake(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    return cu_loss.new_empty(count, dtype=torch.float32)


scatter_op = define_op(
    "scatter_rewards(Tensor rewards, Tensor cu_loss, SymInt count, float weight, str at) -> Tensor",
    _run,
    _fake,
)
