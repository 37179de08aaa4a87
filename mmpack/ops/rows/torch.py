"""gather_rows, sum_rows and scatter_rows in plain PyTorch, on anything."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.rows.inverse import Inverse, inverse_index


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [R, …], index [K] -> [K, …]."""
    return x.index_select(0, index)


def sum_rows(values: Tensor, index: Tensor, inverse: Inverse | None, num_rows: int) -> Tensor:
    """Rows of values [K, …] summed by `index`, in its order: [num_rows, …]."""
    total = torch.promote_types(values.dtype, torch.float32)
    shape = (num_rows, *values.shape[1:])
    if values.device.type == "cpu":  # goes through the index one by one
        summed = values.new_zeros(shape, dtype=total).index_add_(0, index, values.to(total))
    else:
        order, offsets = inverse or inverse_index(index, num_rows)
        rows = values.flatten(1) if values.ndim > 1 else values[:, None]
        summed = torch.segment_reduce(
            rows.index_select(0, order).to(total), "sum", offsets=offsets, unsafe=True, initial=0
        ).view(shape)
    return summed.to(values.dtype)


def scatter_rows(out: Tensor, index: Tensor, values: Tensor) -> None:
    """out [R, …], index [K], values [K, …]: out[index] = values."""
    out.index_copy_(0, index.long(), values)
