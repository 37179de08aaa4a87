"""A batch's segments for linear attention, of families that have it: rows of a forest, or lines of a rectangle."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.ops.attention import AttentionPlan
from mmpack.ops.linear_attention import SegmentPlan, plan_segments


def segments_of(
    family: Family,
    offsets: np.ndarray,
    parents: np.ndarray,
    padding: np.ndarray,
    beside: AttentionPlan,
) -> SegmentPlan | None:
    """Segments [G] of rows; None for a family without linear attention.

    Args: offsets: [G+1]. parents: [G], -1 for a root. padding: bool, [T] or [B, S], True where no token is. beside: the
    same rows.
    """
    if not family.linear_attention:
        return None
    plan = plan_segments(offsets, parents, padding)
    plan.checksum = beside.checksum  # says in a forward that both are of one batch
    return plan
