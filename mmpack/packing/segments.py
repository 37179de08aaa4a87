"""A batch's segments for linear attention, of families that have it: rows of a forest, or lines of a rectangle."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.layout.forest import Forest
from mmpack.ops.attention import AttentionPlan
from mmpack.ops.linear_attention import SegmentPlan, plan_segments


def packed_segments(
    family: Family, forest: Forest, padding: int, beside: AttentionPlan
) -> SegmentPlan | None:
    """Of a pack with `padding` rows at its end; None for a family without linear attention. `beside`: the same rows."""
    total = forest.num_tokens
    padded = np.arange(total + padding) >= total
    return _planned(family, forest.segment_offsets, forest.segment_parent, padded, beside)


def padded_segments(
    family: Family, padding: np.ndarray, beside: AttentionPlan
) -> SegmentPlan | None:
    """Of a rectangle: `padding` is bool [B, S], True where no token is."""
    count, width = padding.shape
    lines = np.arange(count + 1) * width
    return _planned(family, lines, np.full(count, -1), padding, beside)


def _planned(
    family: Family,
    offsets: np.ndarray,
    parents: np.ndarray,
    padding: np.ndarray,
    beside: AttentionPlan,
) -> SegmentPlan | None:
    if not family.linear_attention:
        return None
    plan = plan_segments(offsets, parents, padding)
    plan.checksum = beside.checksum  # says in a forward that both are of one batch
    return plan
