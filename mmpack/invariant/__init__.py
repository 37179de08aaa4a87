"""The same bits in any batch: a mode for a model's forward and backward, and products over ranks summed by one tree."""

from mmpack.exports import exports

_HOME = {
    "mmpack.invariant.mode": ("batch_invariant",),
    "mmpack.invariant.parallel": ("column_parallel", "row_parallel", "tree_all_reduce"),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOME)
