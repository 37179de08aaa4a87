"""Arrays to CPU tensors: whatever a caller hands in, and int32 with its range checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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


def joined(parts: Sequence[torch.Tensor], pin_memory: bool = False) -> torch.Tensor:
    """CPU tensors of one dtype, one after the other along their first dimension, in memory of their own.

    numpy copies them: its arrays of some MB lie in huge pages where Linux has them. torch's take a page fault per 4 kB,
    which costs more than the copy.
    """
    if any(part.requires_grad for part in parts):
        return torch.cat(list(parts))
    first = parts[0]
    as_bytes = [part.contiguous().view(torch.uint8).numpy() for part in parts]  # of bfloat16 too
    if not pin_memory:
        return torch.from_numpy(np.concatenate(as_bytes)).view(first.dtype)
    shape = (sum(map(len, parts)), *first.shape[1:])
    out = torch.empty(shape, dtype=first.dtype, pin_memory=True)
    np.concatenate(as_bytes, out=out.view(torch.uint8).numpy())
    return out


def to_int32(array: np.ndarray) -> torch.Tensor:
    """int32 tensor of the integers in `array`. Raises ArgumentError for one that does not fit."""
    if array.size and max(-int(array.min()), int(array.max())) >= 2**31:
        raise ArgumentError(
            f"pack: {int(array.max())} does not fit 32 bits. Fix: use smaller turn numbers, or smaller packs"
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
