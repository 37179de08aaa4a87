"""Query, key and value as the public functions take them: their shapes, and autocast as torch's own sdpa takes it."""

from __future__ import annotations

import torch

from mmpack.errors import ArgumentError, check_number
from mmpack.ops.inputs import check_are_tensors


def check_operands(
    what: str,
    tensors: dict[str, torch.Tensor],
    scale: float | None,
    dropout: float,
    shape: str = "[B, heads, T, d]",
) -> None:
    """Raise ArgumentError unless query, key and value fit each other, and for numbers out of their range."""
    check_are_tensors(what, **tensors)
    query = tensors["query"]
    for name, x in tensors.items():
        if x.ndim != 4 or x.shape[0] != query.shape[0] or x.shape[2] != query.shape[2]:
            raise ArgumentError(
                f"{what}: {name} has shape {list(x.shape)}, query {list(query.shape)}, expected "
                f"{shape}. Fix: put heads before rows, as attention modules do"
            )
    if scale is not None:
        check_number(what, "scale", scale)
    check_number(what, "dropout", dropout, least=0, most=1)


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
