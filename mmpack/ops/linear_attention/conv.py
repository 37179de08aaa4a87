"""A causal convolution along the paths of a pack, channel by channel, with its gradient: no atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError
from mmpack.ops.backend import Op, implementation
from mmpack.ops.inputs import check_tensors
from mmpack.ops.linear_attention.rule import check_plan
from mmpack.ops.linear_attention.segment_plan import SegmentPlan
from mmpack.ops.rows.inverse import Inverse

SEGMENT_CONV1D = Op("segment_conv1d", __package__, ())


def segment_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    plan: SegmentPlan,
    activation: str | None = "silu",
) -> Tensor:
    """x [T, C], weight [C, K], bias [C] -> [T, C], of x's dtype.

    out[t] = activation(bias + sum over j of weight[:, K-1-j] · x[the j-th row before t on its path]); zeros stand
    before a root. A branch reads its parent's last rows. Summed in float32 (float64 for float64), rounded once.

    Args: plan: of the rows' segments, on their device, with a `conv_width` of K or more. activation: "silu" or None.

    Raises ArgumentError for shapes, dtypes, devices and plans that don't fit.
    """
    check_tensors("segment_conv1d", ("bias",), x=x, weight=weight, bias=bias)
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        raise ArgumentError(
            f"segment_conv1d: x has shape {list(x.shape)}, weight {list(weight.shape)}, expected [T, C] and [C, K]. "
            "Fix: pass conv1d.weight.squeeze(1)"
        )
    if bias is not None and list(bias.shape) != [x.shape[1]]:
        raise ArgumentError(
            f"segment_conv1d: bias has shape {list(bias.shape)}, expected [{x.shape[1]}]. Fix: pass conv1d.bias"
        )
    if activation not in ("silu", None):
        raise ArgumentError(
            f"segment_conv1d: activation is {activation!r}. Fix: 'silu', or None and your own after it"
        )
    check_plan("segment_conv1d", plan, x)
    if plan.conv_width < weight.shape[1]:
        raise ArgumentError(
            f"segment_conv1d: the plan has rows of width {plan.conv_width}, weight has K = {weight.shape[1]}. "
            "Fix: plan_segments(…, conv_width=K)"
        )
    made: Tensor = _Conv.apply(x, weight, bias, plan.previous, *plan.readers, activation == "silu")
    return made


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, order: Tensor,
        offsets: Tensor, silu: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, previous, order, offsets)
        ctx.silu = silu
        out: Tensor = _path(x).conv1d(x, weight, bias, previous, silu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, previous, order, offsets = ctx.saved_tensors
        needs_weight = any(ctx.needs_input_grad[1:3])
        to_x, to_weight, to_bias = _path(x).conv1d_backward(
            grad, x, weight, bias, previous, Inverse(order, offsets), ctx.silu, needs_weight
        )
        return to_x, to_weight, to_bias, None, None, None, None


def _path(x: Tensor) -> Any:
    return implementation(SEGMENT_CONV1D, x.device, x.dtype)
