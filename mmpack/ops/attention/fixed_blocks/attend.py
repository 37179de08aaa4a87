"""The op of fixed blocks, as the kernels of `varlen.py` are called."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.ops import invariance
from mmpack.ops.attention.fixed_blocks import FIXED_BLOCKS
from mmpack.ops.attention.rule import Lengths
from mmpack.ops.backend import choose, implementation


def fixed_blocks(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None, return_lse: bool = False
) -> Any:
    """q [T, heads, d], k and v [K, kv heads, d] -> [T, heads, d]; differentiable.

    Forward: a row is the same bits in any batch, order, padding and forest of prefixes. Gradients to q, k and v are for
    a sequence alone, packed or padded; below a shared prefix `gather_rows` sums those of the branches.

    `return_lse`: also log-sum-exp [heads, T], float32 (float64 for float64), natural log, without a gradient.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choose(FIXED_BLOCKS, q.device, q.dtype) == "torch":
        out, lse = implementation(FIXED_BLOCKS, q.device, q.dtype).attend(q, k, v, lengths, scale)
    else:
        out, lse = _FixedBlocks.apply(q, k, v, lengths, scale)
    invariance.hold(out)
    return (out, lse * math.log(2)) if return_lse else out


class _FixedBlocks(torch.autograd.Function):
    """Values, and log2 of each row's sum."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        path = implementation(FIXED_BLOCKS, q.device, q.dtype)
        out, lse = path.forward(q, k, v, lengths, scale)
        ctx.save_for_backward(q, k, v, out, lse, lengths.cu_seqlens_q, lengths.cu_seqlens_k)
        ctx.rest, ctx.scale = lengths[2:], scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
        path = implementation(FIXED_BLOCKS, q.device, q.dtype)
        lengths = Lengths(*cu_seqlens, *ctx.rest)
        return *path.backward(grad, q, k, v, out, lse, lengths, ctx.scale), None, None
