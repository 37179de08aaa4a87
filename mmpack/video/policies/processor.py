"""What the model's video processor makes of the frames that were chosen: their size, and the seconds of its patches.

Sizes are (width, height) in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmpack.families import Family, get_family
from mmpack.layout.seconds import patch_seconds
from mmpack.video.policies.base import Policy, Settings
from mmpack.video.policies.resize import Size, budget_size, qwen2_size, qwen3_size


def processed_size(policy: Policy, settings: Settings, frames: int, size: Size) -> Size:
    """The size after the processor's resize. Raises: ArgumentError where upstream raises."""
    family = get_family(settings.model)
    assert settings.patch_size and settings.merge_size and settings.temporal_patch_size
    assert family.video is not None and settings.min_pixels and settings.max_pixels
    factor, patch = settings.patch_size * settings.merge_size, settings.temporal_patch_size
    low, high = settings.min_pixels, settings.max_pixels
    old = settings.transformers == "5.8"
    if family.video.resize == "budget":
        fitted = budget_size(size, factor, high)
    elif family.video_layout == "single":
        if settings.cap_pixels_per_frame:
            assert settings.max_video_tokens
            budget = int(settings.max_video_tokens * factor * factor * 0.9)
            high = max(min(high, budget * patch // frames), int(low * 1.05))
        fitted = qwen2_size(size, factor, low, high)
    else:
        if settings.cap_pixels_per_frame:
            assert settings.max_video_tokens
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
        fitted = qwen3_size(size, factor, low, high, frames, patch, round_up=old)
    return checked_size(policy, fitted, size)


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
    family: Family, settings: Settings, frames: int, counted: int, fps: float, *, fps_known: bool
) -> float | None:
    """Seconds of a temporal patch: its frames over the sampled rate, in transformers' order of operations.

    None where the family has none. Of an unknown rate transformers takes its guess for the sampled one.
    """
    if family.tokens_per_second is None:
        return None
    assert settings.temporal_patch_size
    sampled = frames / counted * fps if fps_known else fps
    return settings.temporal_patch_size / sampled


def written_timestamps(
    family: Family, times: Sequence[float], patch: int
) -> tuple[float, ...] | None:
    """Seconds in the prompt, of each temporal patch. None: not written."""
    if family.video_layout != "frames":
        return None
    return tuple(patch_seconds(times, patch, family))
