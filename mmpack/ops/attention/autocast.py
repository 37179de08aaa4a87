"""Autocast, as torch's own sdpa takes it."""

from __future__ import annotations

import torch


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, which have one device and dtype, in the dtype of autocast where that is on; float64 stays."""
    dtype = attended_dtype(tensors[0])
    return tuple(x.to(dtype) for x in tensors)


def attended_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which attention takes it."""
    kind = tensor.device.type
    # `is_autocast_enabled` raises for meta tensors; torch 2.11 can't compile `is_autocast_available`.
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    return (
        torch.get_autocast_dtype(kind) if is_on and tensor.dtype != torch.float64 else tensor.dtype
    )
