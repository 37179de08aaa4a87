"""Reading and decoding sound: samples float32 [n] of one channel, at the rate that a model hears.

Public names are loaded when first used: `import mmpack.audio` loads no decoder.
"""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
