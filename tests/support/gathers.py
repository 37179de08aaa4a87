"""Oracles of gathers and merges: numpy's own sums in order, and what transformers does with vision features."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.rows.inverse import inverse_index

SHAPES = [(), (1,), (3,), (8,), (2, 5), (147,), (588,), (896,), (0,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def summed_in_order(
    values: Tensor, index: Tensor, num_rows: int, interpreted: bool = False
) -> Tensor:
    """Rows of values [K, …] added by index one after the other, in float32 (float64 for float64), rounded once.

    `interpreted`: Triton's interpreter cuts to bfloat16 where GPUs round.
    """
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    total = np.zeros((num_rows, *values.shape[1:]), dtype=np.dtype(str(kind).split(".")[1]))
    np.add.at(total, index.cpu().long().numpy(), values.cpu().to(kind).numpy())
    if interpreted and values.dtype == torch.bfloat16:
        total = (total.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return torch.from_numpy(total).to(values.device, values.dtype)


def some_index(count: int, num_rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[count] rows, many of them several times and some never."""
    drawn = torch.randint(0, max(num_rows * 2 // 3, 1), (count,))
    return drawn.to(device, dtype)


def some_vision(
    device: torch.device, sizes: list[int], runs: list[int], gap: int, tail: int = 0
) -> VisionRows:
    """Media of `sizes` tokens at `runs`, `gap` text rows before each and `tail` at the end."""
    starts = np.cumsum([0, *sizes])
    pieces: list[np.ndarray] = []
    for medium in runs:
        pieces += [np.full(gap, -1), np.arange(starts[medium], starts[medium + 1])]
    source = np.concatenate([*pieces, np.full(tail, -1)]).astype(np.int32)
    rows = np.flatnonzero(source >= 0).astype(np.int32)
    index = torch.from_numpy(source[rows])
    parts = torch.from_numpy(source), torch.from_numpy(rows), index
    return VisionRows(*(p.to(device) for p in (*parts, *inverse_index(index, int(starts[-1])))))


def merged_as_transformers_does(
    embeddings: Tensor, features: Tensor, vision: VisionRows, levels: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """masked_scatter of the features of every run, and the levels' rows of those runs."""
    runs = vision.features.long()
    mask = (vision.source >= 0)[:, None].expand_as(embeddings)
    return embeddings.masked_scatter(mask, features[runs]), [level[runs] for level in levels]
