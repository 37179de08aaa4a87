"""Discounted sums from each token (or turn) to the end of its sample, and GAE: one segment scan."""

from mmpack.ops.backend import Kernel, Op

SEGMENT_RETURNS = Op("segment_returns", __name__, (Kernel("triton"),))
