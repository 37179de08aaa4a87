"""The same bits in any batch: a mode for a model's forward and backward, and products over ranks summed by one tree."""

from mmpack.invariant.mode import batch_invariant
from mmpack.invariant.parallel import column_parallel, row_parallel
from mmpack.invariant.tree import tree_all_reduce, tree_sum
from mmpack.ops.invariance import is_on
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.products.product import product

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
