"""The fields of a plan, out of what a trace records of a video: its Medium, and its policy's name and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.schema.media import Medium
from mmpack.video.policies.base import ASSUMED_FPS
from mmpack.video.policies.processor import written_timestamps
from mmpack.video.policies.registry import policy_of
from mmpack.video.values import read_value

# reader of plans that name none: they were made before there were others
READER_BEFORE_READERS = "container"
_RECORDED = {
    "grid_thw": "tuple[int, int, int]",
    "size": "tuple[int, int]",
    "decoded_size": "tuple[int, int]",
    "fps": "float | None",
    "frame_indices": "tuple[int, ...]",
    "frame_timestamps": "tuple[float, ...]",
    "second_per_grid_ts": "float | None",
    "total_frames": "int",
}
_NEEDED = ("frame_indices", "frame_timestamps", "total_frames", "size", "decoded_size")
_FIX = "record plan.medium_fields()"


def recorded_fields(medium: Medium, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the FramePlan that `medium` and `processor["video"]["sampling"]` record. Raises: ArgumentError."""
    if not isinstance(sampling, Mapping):
        raise ArgumentError(
            f"FramePlan: sampling of {medium.media_id!r:.60} is {type(sampling).__name__}. "
            "Fix: record plan.processor_settings()"
        )
    for name in _NEEDED:
        if getattr(medium, name) is None:
            raise ArgumentError(f"FramePlan: {medium.media_id!r:.60} has no {name}. Fix: {_FIX}")
    values = {"reader": READER_BEFORE_READERS, **sampling}
    policy = policy_of(values.pop("policy", None))
    settings = policy.resolve(values)
    read = _read(medium)
    _check(medium, read, settings.temporal_patch_size)
    t, h, w = read["grid_thw"]
    times, total = read["frame_timestamps"], read["total_frames"]
    fps = ASSUMED_FPS if read["fps"] is None else read["fps"]
    family = get_family(settings.model)
    return {
        "policy": policy.name,
        "settings": settings.to_dict(),
        "indices": read["frame_indices"],
        "timestamps": times,
        "fps": fps,
        "fps_assumed": read["fps"] is None,
        "total_frames": total,
        "counted_frames": policy.counted_frames(total, fps, settings),
        "source_size": read["decoded_size"],
        "loaded_size": read["size"],
        "size": (w * settings.patch_size, h * settings.patch_size),
        "grid_thw": (t, h, w),
        "second_per_grid_ts": read["second_per_grid_ts"],
        "patch_timestamps": written_timestamps(family, times, settings.temporal_patch_size),
    }


def _read(medium: Medium) -> dict[str, Any]:
    out = {}
    for name, kind in _RECORDED.items():
        value = getattr(medium, name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        out[name] = read_value(f"FramePlan: {name} of {medium.media_id!r:.60}", kind, value, _FIX)
    return out


def _check(medium: Medium, read: dict[str, Any], patch: int) -> None:
    """Refuse fields that make no plan together. Raises: ArgumentError naming the first."""
    indices, times = read["frame_indices"], read["frame_timestamps"]
    patches = -(-len(indices) // patch)
    right = {
        "frame_indices": indices and min(indices) >= 0 and _ascends(indices),
        "fps": _is_unknown_or_positive(read["fps"]),
        "second_per_grid_ts": _is_unknown_or_positive(read["second_per_grid_ts"]),
        "total_frames": _is_unknown_or_positive(read["total_frames"]),
        "grid_thw": min(read["grid_thw"]) > 0 and read["grid_thw"][0] == patches,
        "size": min(read["size"]) > 0,
        "decoded_size": min(read["decoded_size"]) > 0,
        "frame_timestamps": len(times) == len(indices)
        and are_times_of(indices, times, read["fps"] or ASSUMED_FPS),
    }
    wrong = next((name for name, holds in right.items() if not holds), None)
    if wrong is not None:
        raise ArgumentError(
            f"FramePlan: {wrong} of {medium.media_id!r:.60} is {read[wrong]!r:.60}, of {len(indices)} frames. "
            f"Fix: {_FIX}"
        )


def are_times_of(indices: tuple[int, ...], times: tuple[float, ...], fps: float) -> bool:
    """Is each time its index over `fps`, up to rounding? All policies count so."""
    return all(abs(t * fps - i) <= 1e-3 * (i + fps) for i, t in zip(indices, times, strict=True))


def _is_unknown_or_positive(value: float | None) -> bool:
    return value is None or 0 < value < math.inf


def _ascends(numbers: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in pairwise(numbers))
