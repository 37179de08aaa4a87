"""Arrays to CPU tensors: whatever a caller hands in, and int32 with its range checked."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError


def as_tensor(values: Any) -> torch.Tensor:
    """A CPU tensor of an array, a tensor or a list, without a copy where torch allows it."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        return torch.tensor(values)
    return torch.as_tensor(values).cpu()


def to_read(values: Any) -> torch.Tensor:
    """The same, also of a read-only array (of Arrow, of Ray) without a copy: torch has no tensor that can't be written
    to, so this one is only to be read."""
    if not isinstance(values, np.ndarray) or values.flags.writeable or not values.nbytes:
        return as_tensor(values)
    array = np.ascontiguousarray(values)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]
    return torch.from_numpy(np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape))


def to_int32(array: np.ndarray) -> torch.Tensor:
    """int32 tensor of the integers in `array`. Raises ArgumentError for one that does not fit."""
    if array.size and max(-int(array.min()), int(array.max())) >= 2**31:
        raise ArgumentError(
            f"pack: {int(array.max())} does not fit 32 bits. Fix: use smaller turn numbers, or smaller packs"
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
