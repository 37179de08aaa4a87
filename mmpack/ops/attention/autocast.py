"""Autocast, as torch's own sdpa takes it."""

from __future__ import annotations

import torch


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, which have one device and dtype, in the dtype of autocast where that is on; float64 stays."""
    kind = tensors[0].device.type
    if not _is_on(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) for x in tensors)


def _is_on(kind: str) -> bool:
    """`is_autocast_enabled` raises for meta tensors; torch 2.11 can't compile `is_autocast_available`."""
    return kind != "meta" and torch.is_autocast_enabled(kind)
