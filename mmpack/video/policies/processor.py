"""What the model's video processor makes of the frames that were chosen: their size, and the seconds of its patches.

Sizes are (width, height) in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmpack.families import Family, get_family
from mmpack.layout.seconds import patch_seconds
from mmpack.video.policies.base import Policy
from mmpack.video.policies.resize import Size, budget_size, qwen2_size, qwen3_size


def processed_size(policy: Policy, settings: Any, frames: int, size: Size) -> Size:
    """The size after the processor's resize. Raises: ArgumentError where upstream raises."""
    family = get_family(settings.model)
    assert family.video is not None
    fit = _of_qwen2_vl if family.video_layout == "single" else _of_qwen3_vl
    if family.video.resize == "budget":
        fit = _of_budget
    return checked_size(policy, fit(policy, settings, frames, size), size)


def checked_size(policy: Policy, fitted: Size | None, size: Size) -> Size:
    """`fitted`, if it is a size. Raises: ArgumentError where no resize accepts `size`."""
    if fitted is None or min(fitted) < 1:
        raise policy.error(
            f"frames of {size[0]} x {size[1]} can't be resized (one side is more than 200 times the other, "
            "or the pixel limits leave nothing)",
            "crop them, or set min_pixels and max_pixels",
        )
    return fitted


def seconds_per_patch(
    family: Family, settings: Any, frames: int, counted: int, fps: float, *, fps_known: bool
) -> float | None:
    """Seconds of a temporal patch: its frames over the sampled rate, in transformers' order of operations.

    None where the family has none. Of an unknown rate transformers takes its guess for the sampled one.
    """
    if family.tokens_per_second is None:
        return None
    sampled = frames / counted * fps if fps_known else fps
    return float(settings.temporal_patch_size / sampled)


def written_timestamps(
    family: Family, times: Sequence[float], patch: int
) -> tuple[float, ...] | None:
    """Seconds in the prompt, of each temporal patch. None: not written."""
    if family.video_layout != "frames":
        return None
    return tuple(patch_seconds(times, patch, family))


def _of_qwen2_vl(policy: Policy, settings: Any, frames: int, size: Size) -> Size | None:
    factor = settings.patch_size * settings.merge_size
    low, high = settings.min_pixels, settings.max_pixels
    if settings.cap_pixels_per_frame:
        budget = int(settings.max_video_tokens * factor * factor * 0.9)
        share = budget * settings.temporal_patch_size // frames
        high = max(min(high, share), int(low * 1.05))
    return qwen2_size(size, factor, low, high)


def _of_budget(policy: Policy, settings: Any, frames: int, size: Size) -> Size | None:
    return budget_size(size, settings.patch_size * settings.merge_size, settings.max_pixels)


def _of_qwen3_vl(policy: Policy, settings: Any, frames: int, size: Size) -> Size | None:
    factor, patch = settings.patch_size * settings.merge_size, settings.temporal_patch_size
    low, high = settings.min_pixels, settings.max_pixels
    old = settings.transformers == "5.8"
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * factor * factor, high // frames)
        high = max(share, int(low * 1.05)) * frames
    if old and min(size) < factor:
        raise policy.error(
            f"frames of {size[0]} x {size[1]} are smaller than a merged patch of {factor}",
            "enlarge them, or set transformers='5.15'",
        )
    if not old and frames < patch:
        raise policy.error(
            f"{frames} frame is less than a temporal patch of {patch}, which the processor refuses",
            "pass it as an image, or (before transformers 5.15) set transformers='5.8'",
        )
    return qwen3_size(size, factor, low, high, frames, patch, round_up=old)
