"""Rows gathered by index, and rows summed by index: each is the gradient of the other. Rows written by index."""

from mmpack.ops.backend import Kernel, Op

GATHER_ROWS = Op("gather_rows", __name__, (Kernel("cuda"), Kernel("triton")))
SUM_ROWS = Op("sum_rows", __name__, (Kernel("triton"),))
SCATTER_ROWS = Op("scatter_rows", __name__, (Kernel("triton"),))
