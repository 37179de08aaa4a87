"""Frame positions as torch's `arange` and `linspace` give them on a CPU: float32, in blocks of eight, bit for bit.

Both round differently from float64, which decides which frame is taken. torch itself is not needed.
"""

from __future__ import annotations

import math

import numpy as np

_LANES, _UNROLLED = 8, 16  # of AVX2, which these two use on every x86 machine


def torch_arange(stop: int, step: float) -> np.ndarray:
    """float32 `torch.arange(0, stop, step)`; its last value can be `stop` itself."""
    i = np.arange(math.ceil(stop / step))
    block = i // _LANES * _LANES
    start = (block * step).astype(np.float32).astype(np.float64)
    in_blocks = i < len(i) // _UNROLLED * _UNROLLED
    return np.where(in_blocks, start + (i - block) * step, i * step).astype(np.float32)


def torch_linspace(start: int, stop: int, count: int) -> np.ndarray:
    """float32 `torch.linspace(start, stop, count)`: from both ends to the middle, each product added unrounded."""
    first, last = np.float64(np.float32(start)), np.float64(np.float32(stop))
    if count == 1:
        return np.asarray([first], dtype=np.float32)
    step = np.float32(np.float32(last - first) / np.float32(count - 1)).astype(np.float64)
    i = np.arange(count)
    rising, falling = first + step * i, last - step * (count - 1 - i)
    return np.where(i < count // 2, rising, falling).astype(np.float32)
