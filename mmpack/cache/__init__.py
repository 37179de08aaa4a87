"""Results that are computed once and reused: features of media, and an index of prefixes whose KV is kept.

The index and its keys are numpy; stores of tensors are loaded when first used.
"""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
