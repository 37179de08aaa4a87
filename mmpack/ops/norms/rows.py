"""Sums over the last dimension, each row in an order that follows from its length alone.

torch spreads a long row over several blocks of a GPU where there are few rows, and so sums it in another order.
Maxima need no order: what is made of sums and maxima (softmax, variance) is made here of the same sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.backend import implementation
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.norms import ROW_SUM
from mmpack.ops.products.product import FLOATS


def row_sum(x: Tensor) -> Tensor:
    """x [..., N] -> [...], of x's dtype; summed in float32 (float64 for float64), rounded once. Differentiable.

    Raises ArgumentError for what is no floating tensor of one dimension or more.

    Example:
        >>> import torch
        >>> from mmpack.ops.norms.rows import row_sum
        >>> row_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [3.0, 7.0]
    """
    check_are_tensors("row_sum", x=x)
    if x.ndim == 0 or x.dtype not in FLOATS:
        raise ArgumentError(
            f"row_sum: x has shape {list(x.shape)} and dtype {x.dtype}, expected [..., N] of floats. "
            "Fix: pass rows"
        )
    return _RowSum.apply(x)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.width = x.shape[-1]
        return sum_rows_of(x, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[..., None].expand(*grad.shape, ctx.width)


def sum_rows_of(x: Tensor, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`row_sum` without its checks: scale · sum, of `out_dtype`."""
    with torch.no_grad():
        if not x.numel():
            return x.new_zeros(x.shape[:-1], dtype=out_dtype)
        flat = x.reshape(-1, x.shape[-1])
        path = implementation(ROW_SUM, x.device, x.dtype)
        made: Tensor = path.row_sum(flat, out_dtype, scale)
    return made.view(x.shape[:-1])


def softmax(x: Tensor, log: bool, out_dtype: torch.dtype) -> Tensor:
    """Softmax of the last dimension, or its logarithm, of `out_dtype`; no gradient of its own."""
    with torch.no_grad():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        shifted = wide - wide.amax(-1, keepdim=True)
        total = sum_rows_of(shifted.exp(), wide.dtype)[..., None]
        made = shifted - total.log() if log else shifted.exp() / total
    return made.to(out_dtype)


def variance(x: Tensor, correction: float, out_dtype: torch.dtype) -> Tensor:
    """Variance of the last dimension, by two passes; no gradient of its own."""
    with torch.no_grad():
        wide, count = x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1]
        off = wide - sum_rows_of(wide, wide.dtype, 1 / count)[..., None]
        scale = 1 / (count - correction) if count > correction else float("inf")
        return sum_rows_of(off * off, out_dtype, scale)
