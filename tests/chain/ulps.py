"""Distances of floats in units in the last place: how many steps of the dtype lie between two values."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of

_BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """int64, of the shape of `a` and `b`: the steps of their dtype from one to the other; 0 exactly for equal values.

    +0 and -0 are one value. A value that is no number is as far from another as can be, and 0 from another NaN.
    Two float64 of unlike signs may be further apart than int64 counts: then it is int64's largest.

    Raises: ArgumentError for what is no pair of float tensors of one dtype, shape and device.

    Example: 1 and the next float32, and two neighbours of 0.
        >>> import torch
        >>> from chain.ulps import ulps
        >>> a, b = torch.tensor([1.0, -1e-45]), torch.tensor([1.00000012, 1e-45])
        >>> ulps(a, b)
        tensor([1, 2])
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor) or x.dtype not in _BITS:
            found = x.dtype if isinstance(x, Tensor) else kind_of(x)
            raise ArgumentError(
                f"ulps: {name} is {found}. Fix: pass a tensor of float16, bfloat16, float32 or float64"
            )
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        raise ArgumentError(
            f"ulps: a is {a.dtype} {list(a.shape)} on {a.device}, b {b.dtype} {list(b.shape)} on {b.device}. "
            "Fix: pass two tensors of one dtype, shape and device"
        )
    x, y = _steps(a), _steps(b)
    most = torch.iinfo(torch.int64).max
    # unlike signs: each distance from 0, added as far as int64 goes
    apart = (x < 0) != (y < 0)
    near = torch.where(apart, 0, x - y).abs()
    low, high = x.abs(), y.abs()
    far = torch.where(low > most - high, most, low + high)
    out = torch.where(apart, far, near)
    either, both = a.isnan() | b.isnan(), a.isnan() & b.isnan()
    return out.masked_fill(either, most).masked_fill(both, 0)


def _steps(x: Tensor) -> Tensor:
    """int64: the place of each value among those of its dtype; 0 for zeros."""
    bits = _BITS[x.dtype]
    raw = x.detach().contiguous().view(_INTEGERS[bits]).long()
    magnitude = raw & ((1 << (bits - 1)) - 1)
    return torch.where(raw < 0, -magnitude, magnitude)
