"""a · b where each element's bits follow from its row of a and its column of b alone.

cuBLAS and MKL choose a kernel by the number of rows, so the same row comes out with other bits in another batch. Here K
is summed in one order for any number of rows and any place of a row: see `triton.py`, and `torch.py` for other devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError
from mmpack.ops.backend import implementation
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.products import PRODUCT

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """a [M, K] · b [K, N] + bias [N] -> [M, N], or [B, M, K] · [B, K, N] -> [B, M, N]; differentiable.

    Sums are of float32 (float64 for float64) and are rounded once. float32 factors are multiplied as torch's setting
    for CUDA says (`torch.backends.cuda.matmul`).

    Args: `a`, `b`, `bias`: of one dtype; bfloat16, float16, float32 or float64. `bias`: of two dimensions' product
    only. `out_dtype`: that of a, or float32.
    Raises ArgumentError for shapes and dtypes that don't fit.

    Example:
        >>> import torch
        >>> from mmpack.ops.products.product import product
        >>> product(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    check_are_tensors("product", ("bias",), a=a, b=b, bias=bias)
    batched = a.ndim == 3
    if (
        a.ndim not in (2, 3)
        or b.ndim != a.ndim
        or a.shape[-1] != b.shape[-2]
        or (batched and a.shape[0] != b.shape[0])
    ):
        raise ArgumentError(
            f"product: a has shape {list(a.shape)}, b {list(b.shape)}, expected [M, K] and [K, N], or a batch of "
            "both. Fix: pass b.T for rows of weights"
        )
    if a.dtype != b.dtype or a.dtype not in FLOATS or a.device != b.device:
        raise ArgumentError(
            f"product: a is {a.dtype} on {a.device}, b {b.dtype} on {b.device}. "
            "Fix: cast both to one floating dtype, on one device"
        )
    if bias is not None and (bias.dtype != a.dtype or bias.device != a.device):
        raise ArgumentError(
            f"product: bias is {bias.dtype} on {bias.device}, a {a.dtype} on {a.device}. "
            "Fix: cast it to the dtype of the factors, on their device"
        )
    if bias is not None and (batched or list(bias.shape) != [b.shape[-1]]):
        raise ArgumentError(
            f"product: bias has shape {list(bias.shape)}, expected [{b.shape[-1]}]. Fix: pass one per column"
        )
    if out_dtype not in (None, a.dtype, torch.float32):
        raise ArgumentError(
            f"product: out_dtype is {out_dtype}, the factors are {a.dtype}. Fix: pass None or torch.float32"
        )
    return _Product.apply(a, b, bias, out_dtype or a.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        return multiply(a, b, bias, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad.to(a.dtype)
        to_a = multiply(grad, b.mT, None, a.dtype) if needs[0] else None
        to_b = multiply(a.mT, grad, None, b.dtype) if needs[1] else None
        return to_a, to_b, grad.sum(0) if needs[2] else None, None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`product` without its checks; nothing is recorded for autograd."""
    with torch.no_grad():
        path = implementation(PRODUCT, a.device, a.dtype)
        made: Tensor = (
            path.batched(a, b, out_dtype) if a.ndim == 3 else path.product(a, b, bias, out_dtype)
        )
    return made
