"""The same bits in any batch: a mode for a model's forward and backward, and products over ranks summed by one tree."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmpack.errors import needs

if TYPE_CHECKING:
    from mmpack.invariant.mode import batch_invariant
    from mmpack.invariant.parallel import column_parallel, row_parallel, tree_all_reduce

__all__ = ["batch_invariant", "column_parallel", "row_parallel", "tree_all_reduce"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("torch", __name__):
        where = "mode" if name == "batch_invariant" else "parallel"
        value = getattr(importlib.import_module(f"{__name__}.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
