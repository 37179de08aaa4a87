"""Rows gathered by index, and rows summed by index: each is the gradient of the other. Rows written by index."""

from mmpack.ops.backend import Op

GATHER_ROWS = Op("gather_rows", __name__)
SUM_ROWS = Op("sum_rows", __name__)
SCATTER_ROWS = Op("scatter_rows", __name__)
