"""The convolution and its gradients in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.linear_attention.segment_plan import FarReaders
from mmpack.ops.rows.torch import sum_rows


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, silu: bool) -> Tensor:
    """x [T, C], weight [C, K], bias [C], previous [T, K-1] -> [T, C]."""
    out = _before_activation(x, weight, bias, previous)
    return (out * _sigmoid(out) if silu else out).to(x.dtype)


def conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, far: FarReaders,
    silu: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients to x, weight and bias; None for the last two unless `needs_weight`."""
    wide, taps = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    grad = grad.to(wide)
    if silu:
        out = _before_activation(x, weight, bias, previous)
        sigmoid = _sigmoid(out)
        grad = grad * sigmoid * (1 + out * (1 - sigmoid))
    weights = weight.to(wide)
    to_x, to_weight = grad * weights[:, -1], []
    for tap in range(taps - 1):
        index = previous[:, tap]
        there = (index >= 0)[:, None]
        moved = torch.where(there, grad * weights[:, taps - 2 - tap], 0)
        to_x = to_x + sum_rows(moved, index.clamp(min=0), None, len(x))
        if needs_weight:
            to_weight.append((grad * _rows(x, index).to(wide)).sum(0))
    if not needs_weight:
        return to_x.to(x.dtype), None, None
    to_weight = [*to_weight[::-1], (grad * x.to(wide)).sum(0)]
    to_bias = None if bias is None else grad.sum(0).to(bias.dtype)
    return to_x.to(x.dtype), torch.stack(to_weight, 1).to(weight.dtype), to_bias


def _before_activation(x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor) -> Tensor:
    """Summed from the oldest row to the row itself, in float32 (float64 for float64)."""
    wide, taps = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    weights = weight.to(wide)
    out = x.new_zeros(x.shape, dtype=wide) if bias is None else bias.to(wide).expand(x.shape)
    for tap in range(taps - 2, -1, -1):
        out = out + _rows(x, previous[:, tap]).to(wide) * weights[:, taps - 2 - tap]
    return out + x.to(wide) * weights[:, -1]


def _sigmoid(x: Tensor) -> Tensor:
    """By exp alone: torch's own sigmoid and silu have other bits where a vector of values ends."""
    return 1 / (1 + (-x).exp())


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], zeros where it is -1."""
    return torch.where((index >= 0)[:, None], x.index_select(0, index.clamp(min=0)), 0)
