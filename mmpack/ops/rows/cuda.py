"""mmpack::gather_rows by csrc/gather_rows.cu; its gradient has no kernel there."""

from __future__ import annotations

import math

from torch import Tensor

from mmpack.ops import csrc, native


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [R, …], index [K] -> [K, …]."""
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
    out: Tensor = native.native_ops().gather_rows.default(flat, csrc.index(index))
    return out.view(len(index), *x.shape[1:])
