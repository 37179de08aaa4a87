"""Which frames of a video are taken (plans, by policy), reading and decoding files, patch order.

Public names are loaded when first used: `import mmpack.video` loads neither torch nor av.
"""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
