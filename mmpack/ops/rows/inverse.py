"""The inverse of an index [K] into R rows: for each row, the places that read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inverse(NamedTuple):
    """The places of an index [K] by the row that they read: row r's are order[offsets[r] : offsets[r + 1]], rising."""

    order: Tensor  # [K] int32 or int64
    offsets: Tensor  # [R+1]


def inverse_index(index: Tensor, num_rows: int) -> Inverse:
    """The Inverse of `index` [K] into `num_rows` rows, on its device: one stable sort."""
    ordered, order = torch.sort(index, stable=True)
    rows = torch.arange(num_rows + 1, device=index.device, dtype=index.dtype)
    offsets = torch.searchsorted(ordered, rows, out_int32=True)
    return Inverse(order.to(torch.int32), offsets)
