"""`sample`: which frames of a video, by the name of a policy, as one plan for the rollout and the trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.video.frame_plan import FramePlan
from mmpack.video.info import VideoInfo, probe
from mmpack.video.policies import qwen_vl_utils, transformers_qwen2_vl, transformers_qwen3_vl, vllm
from mmpack.video.policies.base import ASSUMED_FPS, Policy, written_timestamps
from mmpack.video.values import read_value

if TYPE_CHECKING:
    from mmpack.schema.media import Medium

POLICIES: dict[str, Policy] = {
    module.POLICY.name: module.POLICY
    for module in (qwen_vl_utils, transformers_qwen2_vl, transformers_qwen3_vl, vllm)
}

BEFORE_READERS = (
    "container"  # of plans that name no reader: they were made before there were others
)


def sample(info_or_source: Any, *, policy: str, **settings: Any) -> FramePlan:
    """The plan that `policy` makes of a video.

    Args:
        info_or_source: a VideoInfo, or a video's bytes or path (then the container is read, nothing is decoded).
        policy: a name of `POLICIES`: `qwen_vl_utils`, `transformers_qwen2_vl`, `transformers_qwen3_vl`, `vllm`.
        settings: of the policy, under upstream's names; `docs/video.md` lists them.

    Returns: indices and times as upstream has them; a clip's real times beside them where the container has them.
    Raises: ArgumentError for an unknown policy or setting, and wherever upstream raises.
    """
    chosen = policy_of(policy)
    resolved = chosen.resolve(settings)
    return chosen.plan(_info(info_or_source), resolved)


def policy_of(name: Any) -> Policy:
    """The policy called `name`. Raises: ArgumentError."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ArgumentError(
            f"sample: policy {name!r:.60} is unknown. Fix: use one of {', '.join(POLICIES)}"
        )
    return POLICIES[name]


def settings_dict(settings: Any) -> dict[str, Any]:
    """A policy's settings as a plan holds them: those that are set."""
    return {k: v for k, v in asdict(settings).items() if v is not None}


def recorded(medium: Medium, sampling: Mapping[str, Any]) -> FramePlan:
    """See `FramePlan.from_medium`."""
    if not isinstance(sampling, Mapping):
        raise ArgumentError(
            f"FramePlan: sampling of {medium.media_id!r:.60} is {type(sampling).__name__}. "
            "Fix: record plan.processor_settings()"
        )
    for name in ("frame_indices", "frame_timestamps", "total_frames", "size", "decoded_size"):
        if getattr(medium, name) is None:
            raise ArgumentError(
                f"FramePlan: {medium.media_id!r:.60} has no {name}. Fix: record plan.medium_fields()"
            )
    values = dict(sampling)
    policy = policy_of(values.pop("policy", None))
    values.setdefault("reader", BEFORE_READERS)
    settings = policy.resolve(values)
    found = _recorded_fields(medium, settings.temporal_patch_size)
    t, h, w = found["grid_thw"]
    times, total = found["frame_timestamps"], found["total_frames"]
    family = get_family(settings.model)
    fps = ASSUMED_FPS if found["fps"] is None else found["fps"]
    return FramePlan(
        policy=policy.name,
        settings=settings_dict(settings),
        indices=found["frame_indices"],
        timestamps=times,
        fps=fps,
        fps_assumed=found["fps"] is None,
        total_frames=total,
        counted_frames=counted_frames(total, fps, settings),
        source_size=found["decoded_size"],
        loaded_size=found["size"],
        size=(w * settings.patch_size, h * settings.patch_size),
        grid_thw=(t, h, w),
        second_per_grid_ts=found["second_per_grid_ts"],
        patch_timestamps=written_timestamps(family, times, settings.temporal_patch_size),
    )


def counted_frames(total: int, fps: float, settings: Any) -> int:
    """How many of the file's `total` frames a policy of these resolved settings counts. Raises: ArgumentError."""
    if not isinstance(settings, qwen_vl_utils.Settings):
        return total
    first, last = qwen_vl_utils.frame_range(total, fps, settings)
    return last - first + 1


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


def _recorded_fields(medium: Medium, patch: int) -> dict[str, Any]:
    """Fields of a recorded video that make a plan together. Raises: ArgumentError naming the first that can't."""
    fix = "record plan.medium_fields()"
    out = {}
    for name, kind in _RECORDED.items():
        value = getattr(medium, name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        out[name] = read_value(f"FramePlan: {name} of {medium.media_id!r:.60}", kind, value, fix)
    indices, times = out["frame_indices"], out["frame_timestamps"]
    wrong = {"frame_indices": not indices or min(indices) < 0 or _descends(indices)}
    wrong |= {
        name: value is not None and not 0 < value < math.inf
        for name, value in out.items()
        if name in ("fps", "second_per_grid_ts", "total_frames")
    }
    wrong |= {name: min(out[name]) < 1 for name in ("grid_thw", "size", "decoded_size")}
    wrong["frame_timestamps"] = len(times) != len(indices) or not all(map(math.isfinite, times))
    wrong["grid_thw"] |= out["grid_thw"][0] != -(-len(indices) // patch)
    for name in wrong:
        if wrong[name]:
            raise ArgumentError(
                f"FramePlan: {name} of {medium.media_id!r:.60} is {out[name]!r:.60}, of {len(indices)} frames. "
                f"Fix: {fix}"
            )
    return out


def _descends(numbers: tuple[int, ...]) -> bool:
    return any(b < a for a, b in pairwise(numbers))


def _info(given: Any) -> VideoInfo:
    if isinstance(given, bytes | bytearray | memoryview | str | os.PathLike):
        return probe(given)
    if not isinstance(given, VideoInfo):
        raise ArgumentError(
            f"sample: {type(given).__name__} is no video. Fix: a file's bytes, its path, or mp.video.probe(…)"
        )
    return given
