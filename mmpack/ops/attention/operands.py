"""Query, key and value as the public functions take them: their shapes, and autocast as torch's own sdpa takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import check_number
from mmpack.ops.inputs import check_are_tensors, check_shapes


def check_operands(
    what: str, tensors: dict[str, Tensor], scale: float | None, dropout: float
) -> None:
    """Raise ArgumentError unless query, key and value fit each other, and for numbers out of their range."""
    check_are_tensors(what, **tensors)
    shapes = {name: (x, f"B {name}_heads T {name}_d") for name, x in tensors.items()}
    check_shapes(what, "put heads before rows, as attention modules do", **shapes)
    if scale is not None:
        check_number(what, "scale", scale)
    check_number(what, "dropout", dropout, least=0, most=1)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, which have one device and dtype, in the dtype of autocast where that is on; float64 stays."""
    dtype = attended_dtype(tensors[0])
    return tuple(x.to(dtype) for x in tensors)


def attended_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which attention takes it."""
    kind = tensor.device.type
    # `is_autocast_enabled` raises for meta tensors; torch 2.11 can't compile `is_autocast_available`.
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    return (
        torch.get_autocast_dtype(kind) if is_on and tensor.dtype != torch.float64 else tensor.dtype
    )
