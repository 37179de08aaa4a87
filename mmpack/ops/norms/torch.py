"""Row sums and RMSNorm in plain torch.

Rows are padded to a multiple of CHUNK_ROWS and summed so many at a time: torch gets one shape for any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK_ROWS = 64


def row_sum(x: Tensor, out_dtype: torch.dtype, scale: float) -> Tensor:
    """scale · sum of x [R, N] -> [R]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.shape[0]
    whole = pad(x.to(dtype), (0, 0, 0, -rows % CHUNK_ROWS)).contiguous()
    out = whole.new_empty(len(whole))
    for first in range(0, len(whole), CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        # `out`: another op of torch than the sum that `mmpack.invariant` puts this one in the place of
        torch.sum(whole[chunk], 1, out=out[chunk])
    return (out[:rows] * scale).to(out_dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [R, N], weight [N] -> [R, N]."""
    return weight * (_wide(x) * _scale(x, eps)).to(x.dtype)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients to x and weight."""
    wide, scale = _wide(x), _scale(x, eps)
    normed, grad = wide * scale, grad.to(wide.dtype)
    along = grad * weight.to(wide.dtype)
    mean = row_sum(along * normed, wide.dtype, 1 / x.shape[1])[:, None]
    to_x = (scale * (along - normed * mean)).to(x.dtype)
    to_weight = None
    if needs_weight:
        to_weight = (grad * normed.to(x.dtype).to(wide.dtype)).sum(0).to(weight.dtype)
    return to_x, to_weight


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(x: Tensor, eps: float) -> Tensor:
    """[R, 1]"""
    wide = _wide(x)
    return (row_sum(wide * wide, wide.dtype, 1 / x.shape[1])[:, None] + eps).rsqrt()
