"""RMSNorm as transformers writes it, in one kernel, with its gradient.

y = weight · (x · r) with r = (mean of x² + eps)^-1/2 in float32; x · r is rounded to x's dtype before the weight
(Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError, check_number
from mmpack.ops import invariance
from mmpack.ops.backend import implementation
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.norms import RMS_NORM
from mmpack.ops.products.product import FLOATS


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., N], weight [N] -> [..., N], of the dtype that x and weight promote to; differentiable.

    A row's value and gradient follow from the row alone; the gradient to weight sums over rows. Dtypes: bfloat16,
    float16, float32, float64.
    Raises ArgumentError for shapes, dtypes and devices that don't fit.

    Example:
        >>> import torch
        >>> from mmpack.ops.norms.rms import rms_norm
        >>> rms_norm(torch.tensor([[3.0, 3.0]]), torch.ones(2), eps=0.0).tolist()
        [[1.0, 1.0]]
    """
    check_are_tensors("rms_norm", x=x, weight=weight)
    check_number("rms_norm", "eps", eps, least=0)
    if x.ndim == 0 or not x.shape[-1] or list(weight.shape) != [x.shape[-1]]:
        raise ArgumentError(
            f"rms_norm: x has shape {list(x.shape)}, weight {list(weight.shape)}, expected [..., N] and [N]. "
            "Fix: pass the norm's own weight"
        )
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or x.device != weight.device:
        raise ArgumentError(
            f"rms_norm: x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}. "
            "Fix: pass floating tensors of 16 bits or more, on one device"
        )
    made: Tensor = _RmsNorm.apply(x, weight, float(eps))
    invariance.hold(made)
    return made


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight = _backward(grad, x, weight, ctx.eps, ctx.needs_input_grad[1])
        return to_x, to_weight, None


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    path = implementation(RMS_NORM, x.device, x.dtype)
    rows: Tensor = path.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps)
    return rows.view(x.shape)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    path = implementation(RMS_NORM, x.device, x.dtype)
    width = x.shape[-1]
    rows, to_weight = path.rms_norm_backward(
        grad.reshape(-1, width), x.reshape(-1, width), weight, eps, needs_weight
    )
    return rows.view(x.shape), to_weight
