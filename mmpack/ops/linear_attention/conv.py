"""A causal convolution along the paths of a pack, channel by channel, with its gradient: no atomics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError
from mmpack.ops.backend import Op, module_of
from mmpack.ops.custom_op import define_op
from mmpack.ops.inputs import check_floats, check_shapes, check_tensors
from mmpack.ops.linear_attention.rule import check_plan
from mmpack.ops.linear_attention.segment_plan import FarReaders, SegmentPlan

_FLOATS = ("bfloat16", "float16", "float32")
SEGMENT_CONV1D = Op(
    "segment_conv1d",
    "mmpack.ops.linear_attention",
    only=_FLOATS,
    why="the kernel can't take {dtype}",
)


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
    shapes = {"x": (x, "T C"), "weight": (weight, "C K"), "bias": (bias, "C")}
    check_shapes("segment_conv1d", "pass conv1d.weight.squeeze(1), and conv1d.bias", **shapes)
    check_floats("segment_conv1d", "pass x.float()", x=x, weight=weight, bias=bias)
    if activation not in ("silu", None):
        raise ArgumentError(
            f"segment_conv1d: activation is {activation!r}. Fix: use 'silu', or None and apply your own afterwards"
        )
    check_plan("segment_conv1d", plan, x)
    if not 0 < weight.shape[1] <= plan.conv_width:
        raise ArgumentError(
            f"segment_conv1d: the plan has rows of width {plan.conv_width}, weight has K = {weight.shape[1]}. "
            "Fix: make it by plan_segments(…, conv_width=K)"
        )
    return _Conv.apply(x, weight, bias, plan.previous, activation == "silu", *plan.far)


class Call(NamedTuple):
    """What both ops read."""

    x: Tensor  # [T, C]
    weight: Tensor  # [C, K]
    bias: Tensor | None  # [C]
    previous: Tensor  # [T, K - 1] or more
    silu: bool


def _run(call: Call) -> Tensor:
    return module_of(SEGMENT_CONV1D, call.x, call.weight).conv1d(*call)


def _run_backward(
    grad: Tensor, call: Call, far: FarReaders, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, weight and bias; those of weight and bias are empty where not asked for."""
    *tensors, silu = call
    to_x, to_weight, to_bias = module_of(SEGMENT_CONV1D, call.x, call.weight).conv1d_backward(
        grad, *tensors, far, silu, needs_weight
    )
    none = call.weight.new_empty(0)
    return to_x, none if to_weight is None else to_weight, none if to_bias is None else to_bias


def _fake(call: Call) -> Tensor:
    return torch.empty_like(call.x, memory_format=torch.contiguous_format)


def _fake_backward(
    grad: Tensor, call: Call, far: FarReaders, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = call[:3]
    to_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_weight = weight.new_empty(weight.shape if needs_weight else [0])
    to_bias = weight.new_empty(0)
    if needs_weight and bias is not None:
        to_bias = bias.new_empty(bias.shape)
    return to_x, to_weight, to_bias


_conv = define_op("segment_conv1d", _run, _fake)
_conv_backward = define_op("segment_conv1d_backward", _run_backward, _fake_backward)


class _Conv(torch.autograd.Function):
    """segment_conv1d from the fields of a Call, then those of FarReaders."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *call, silu = arguments[: len(Call._fields)]
        ctx.save_for_backward(*call, *arguments[len(Call._fields) :])
        ctx.silu = silu
        return _conv(*call, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_weight = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        *call, rows, offsets, entries = ctx.saved_tensors
        to_x, *to_weights = _conv_backward(
            grad, *call, ctx.silu, rows, offsets, entries, needs_weight
        )
        to_weight, to_bias = (
            found if needed else None
            for found, needed in zip(to_weights, ctx.needs_input_grad[1:3], strict=True)
        )
        return to_x, to_weight, to_bias, *(None,) * 5
