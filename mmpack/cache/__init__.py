"""Results that are computed once and reused: features of media, and an index of prefixes whose KV is kept.

The index and its keys are numpy; stores of tensors are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmpack.cache.index import PrefixIndex
from mmpack.cache.keys import prefix_keys
from mmpack.cache.predict import predict_cached_tokens
from mmpack.errors import needs

if TYPE_CHECKING:
    from mmpack.cache.features import FeatureStore
    from mmpack.cache.rows import RowStore
    from mmpack.cache.summed import SummedFeatures

_TENSORS = {"FeatureStore": "features", "RowStore": "rows", "SummedFeatures": "summed"}

__all__ = [
    "FeatureStore",
    "PrefixIndex",
    "RowStore",
    "SummedFeatures",
    "predict_cached_tokens",
    "prefix_keys",
]


def __getattr__(name: str) -> Any:
    if name not in _TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("torch", __name__):
        value = getattr(importlib.import_module(f"{__name__}.{_TENSORS[name]}"), name)
    globals()[name] = value
    return value
