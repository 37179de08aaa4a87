"""Rows of bytes and a table for them, and what numpy's indexing makes of both."""

from __future__ import annotations

import numpy as np
import torch


def some_bytes(patches: int, dim: int = 1176, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (patches, dim), dtype=torch.uint8, generator=rng)
    return rows, torch.randn(3, 256, generator=rng)


def indexed(
    rows: torch.Tensor, values: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    channel = np.arange(rows.shape[1]) // (rows.shape[1] // 3)
    return torch.from_numpy(values.numpy()[channel, rows.numpy()]).to(dtype)
