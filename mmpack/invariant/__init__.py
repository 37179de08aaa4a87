"""The same bits in any batch: a mode for a model's forward and backward, and products over ranks summed by one tree."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmpack.errors import needs
from mmpack.ops.invariance import is_on

if TYPE_CHECKING:
    from mmpack.invariant.mode import batch_invariant
    from mmpack.invariant.parallel import column_parallel, row_parallel
    from mmpack.invariant.tree import tree_all_reduce, tree_sum
    from mmpack.ops.norms.rms import rms_norm
    from mmpack.ops.products.product import product

_TENSORS = {
    "batch_invariant": "mmpack.invariant.mode",
    "column_parallel": "mmpack.invariant.parallel",
    "product": "mmpack.ops.products.product",
    "rms_norm": "mmpack.ops.norms.rms",
    "row_parallel": "mmpack.invariant.parallel",
    "tree_all_reduce": "mmpack.invariant.tree",
    "tree_sum": "mmpack.invariant.tree",
}

__all__ = [
    "batch_invariant",
    "column_parallel",
    "is_on",
    "product",
    "rms_norm",
    "row_parallel",
    "tree_all_reduce",
    "tree_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("torch", __name__):
        value = getattr(importlib.import_module(_TENSORS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
