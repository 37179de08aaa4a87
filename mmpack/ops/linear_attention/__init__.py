"""Linear attention of packed rows [T]: a causal convolution and the gated delta rule, along the paths of a forest.

A root starts from nothing, a branch from its parent's last state and last inputs; a plain pack is a forest of roots.
Segments run in waves, one per depth. `ops/backend.py` chooses how the convolution runs, `choose.py` how the rule does.
"""

from mmpack.ops.linear_attention.conv import SEGMENT_CONV1D, segment_conv1d
from mmpack.ops.linear_attention.rule import segment_delta_rule
from mmpack.ops.linear_attention.segment_plan import SegmentPlan, plan_segments

__all__ = ["SEGMENT_CONV1D", "SegmentPlan", "plan_segments", "segment_conv1d", "segment_delta_rule"]
