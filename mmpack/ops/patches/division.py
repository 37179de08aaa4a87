"""Where a quotient that kernels make in three steps (Markstein 1990) has the bits of IEEE division."""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def divides_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> bool:
    """Whether (x − mean) / std has the bits of IEEE division, of every byte x, where a reciprocal and fma make it."""
    x = np.arange(256, dtype=np.float32)[:, None] - np.array(mean, np.float32)
    by = np.array(std, np.float32)
    inverse = np.float32(1) / by
    near = x * inverse
    wide = np.longdouble
    left = (x.astype(wide) - near.astype(wide) * by.astype(wide)).astype(np.float32)
    made = (near.astype(wide) + left.astype(wide) * inverse.astype(wide)).astype(np.float32)
    return np.array_equal(made, x / by)
