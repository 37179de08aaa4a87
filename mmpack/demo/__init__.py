"""The demonstration: drawn problems and clips, tiny models, the step of `mmpack smoke` with all its checks.

Public names are loaded when first used, and torch and transformers with those that need them.
"""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, extra="smoke")
