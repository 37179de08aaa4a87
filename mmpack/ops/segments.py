"""Sums over segments of [N] values: fixed order, float64, no atomics, no host sync.

A segment's sum is the same binary tree whatever lies around it: its bits don't depend on the rest of the batch, and
a NaN stays in its segment. Every function does O(N log N) work in a number of steps that only shapes decide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def suffix_scan(
    values: Tensor, stop: Tensor, decay: float = 1.0, longest: int | None = None
) -> Tensor:
    """y[i] = sum over k of decay^k · values[i+k] for i+k < stop[i]; values [N] float64, stop [N] int64, non-decreasing.

    Doubling (Hillis and Steele, 1986): after the step of reach r each y[i] holds 2r terms. `longest`: no sum has more
    terms, where that is known.
    """
    count = values.shape[0]
    index = torch.arange(count, device=values.device)
    most, reach = count if longest is None else min(longest, count), 1
    while reach < most:
        inside = index[reach:] < stop[:-reach]
        ahead = torch.where(inside, values[reach:] * decay**reach, 0.0)
        values = torch.cat([values[:-reach] + ahead, values[-reach:]])
        reach *= 2
    return values


def segment_ids(cu: Tensor, count: int) -> Tensor:
    """The segment of each of `count` elements, int64 [N]; cu [B+1] are the segments' offsets."""
    index = torch.arange(count, device=cu.device, dtype=cu.dtype)
    # in all of cu: compiled by inductor, a search in cu[1:] starts at cu[0] (pytorch/pytorch#182343)
    return (torch.searchsorted(cu, index, right=True) - 1).clamp_(min=0)


def entry_segments(cu: Tensor, count: int) -> Tensor:
    """`segment_ids` [count] of entries, all of a segment that exists, whatever cu [B+1] says: no address out of bounds.

    With no segment it is 0.
    """
    return segment_ids(cu, count).clamp_(max=max(len(cu) - 2, 0))


def segment_sum(values: Tensor, cu: Tensor) -> Tensor:
    """Sum values [N] over the segments between offsets cu [B+1]: [B] float64, 0 for an empty one. Differentiable.

    Example:
        >>> import torch
        >>> from mmpack.ops.segments import segment_sum
        >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
        tensor([3., 0., 4.], dtype=torch.float64)
    """
    return _SegmentSum.apply(values, cu)


def keyed_sum(values: Tensor, keys: Tensor) -> Tensor:
    """For each n the sum of values over all entries with the key of n, in the order of n; [N], [N] -> [N] float64."""
    count = keys.shape[0]
    keys, order = torch.sort(keys, stable=True)
    start = torch.searchsorted(keys, keys)
    stop = torch.searchsorted(keys, keys, right=True)
    total = suffix_scan(values.to(torch.float64)[order], stop)[start]
    return torch.empty(count, dtype=torch.float64, device=values.device).index_copy_(
        0, order, total
    )


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cu: Tensor) -> Tensor:
        cu = cu.long()
        segment = segment_ids(cu, values.shape[0])
        ctx.save_for_backward(segment)
        ctx.dtype = values.dtype
        sums = torch.cat([values.double(), values.new_zeros(1, dtype=torch.float64)])
        # One element more than N, so that the start of an empty last segment can be read.
        stop = torch.cat([cu[1:][segment], cu.new_zeros(1)])
        sums = suffix_scan(sums, stop)
        return torch.where(cu[1:] > cu[:-1], sums[cu[:-1]], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (segment,) = ctx.saved_tensors
        return grad[segment].to(ctx.dtype), None
