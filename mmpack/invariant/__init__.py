"""The same bits in any batch: a mode for a model's forward and backward, and products over ranks summed by one tree."""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
