"""Plans of one video side by side: the fields in which they differ, and the frames in which they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.video.frame_plan import FramePlan

# each follows from those before it
COMPARED = (
    *("fps", "indices", "timestamps", "resizes"),
    *("grid_thw", "num_tokens", "second_per_grid_ts", "patch_timestamps"),
)


def differing_fields(plans: Sequence[FramePlan]) -> list[str]:
    """Names of `COMPARED` that are not equal in all plans."""
    return [name for name in COMPARED if differ(plans, name)]


def differ(plans: Sequence[FramePlan], name: str) -> bool:
    """Whether a field differs; plans of models that don't have it are left out."""
    values = {getattr(plan, name) for plan in plans} - {None}
    if name == "second_per_grid_ts":  # every upstream makes positions of its float32
        values = {np.float32(value) for value in values}
    return len(values) > 1


def differing_rows(plans: Sequence[FramePlan]) -> list[bool]:
    """For each k: do the k-th frames of the plans differ in number or time, or has a plan fewer frames?"""
    most = max(plan.num_frames for plan in plans)
    return [len({_frame(plan, k) for plan in plans}) > 1 for k in range(most)]


def _frame(plan: FramePlan, k: int) -> tuple[int, float] | None:
    return (plan.indices[k], plan.timestamps[k]) if k < plan.num_frames else None
