"""Discounted sums from each token (or turn) to the end of its sample, and GAE: one segment scan."""

from mmpack.ops.backend import Op

SEGMENT_RETURNS = Op("segment_returns", __name__)
