"""Results that are computed once and reused: features of media, and an index of prefixes whose KV is kept.

The index and its keys are numpy; stores of tensors are loaded when first used.
"""

from mmpack.exports import exports

_HOME = {
    "mmpack.cache.features": ("FeatureStore",),
    "mmpack.cache.index": ("PrefixIndex",),
    "mmpack.cache.keys": ("prefix_keys",),
    "mmpack.cache.predict": ("predict_cached_tokens",),
    "mmpack.cache.rows": ("RowStore",),
    "mmpack.cache.summed": ("SummedFeatures",),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOME)
