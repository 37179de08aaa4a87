"""`sample`: which frames of a video, by the name of a policy, as one plan for the rollout and the trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.video.frame_plan import FramePlan
from mmpack.video.info import VideoInfo, probe
from mmpack.video.limits import Limits
from mmpack.video.policies.base import Choice, Policy, Settings
from mmpack.video.policies.processor import processed_size, seconds_per_patch, written_timestamps
from mmpack.video.policies.registry import policy_of
from mmpack.video.policies.resize import Size


def sample(info_or_source: Any, *, policy: str, **settings: Any) -> FramePlan:
    """The plan that `policy` makes of a video.

    Args:
        info_or_source: a VideoInfo, or a video's bytes or path (then the container is read, nothing is decoded).
        policy: a name of `POLICIES`: `qwen_vl_utils`, `transformers_qwen2_vl`, `transformers_qwen3_vl`,
            `transformers_glm4v`, `transformers_glm46v`, `vllm`.
        settings: of the policy, under upstream's names; `docs/video.md` lists them.

    Returns: indices and times as upstream has them; also a clip's real times where the container has them.
    Raises: ArgumentError for an unknown policy or setting, and wherever upstream raises.

    Example: two seconds of 10 frames per second, as Qwen3-VL's processor samples them.
        >>> from mmpack.video import sample
        >>> from mmpack.video.info import VideoInfo
        >>> clip = VideoInfo(width=640, height=360, rotation=0, codec="h264", fps=10.0, total_frames=20,
        ...     timestamps=None, variable=False, duration=2.0, content_key="0" * 64)
        >>> plan = sample(clip, policy="transformers_qwen3_vl")
        >>> plan.indices, plan.size, plan.grid_thw, plan.num_tokens
        ((0, 6, 13, 19), (640, 352), (2, 22, 40), 440)
    """
    chosen = policy_of(policy)
    resolved = chosen.resolve(settings)
    info = chosen.as_read(_info(info_or_source), resolved)
    return plan_of(chosen, resolved, info, chosen.choose(info, resolved))


def plan_of(policy: Policy, settings: Settings, info: VideoInfo, choice: Choice) -> FramePlan:
    """The plan of the frames in `choice`, once the model's processor has resized and counted them.

    `settings` are resolved, `info` is as their reader has it. Raises: ArgumentError where upstream raises.
    """
    assert settings.patch_size and settings.temporal_patch_size
    family = get_family(settings.model)
    frames = tuple(int(i) for i in choice.indices)
    _refuse_missing_frames(policy, settings, info, frames)
    loaded, size = _sizes(policy, settings, info, choice)
    counted = policy.counted_frames(info.total_frames, choice.fps, settings)
    known = choice.hides_guess or not choice.fps_assumed
    seconds = seconds_per_patch(family, settings, len(frames), counted, choice.fps, fps_known=known)
    if seconds is not None and choice.float32_seconds:
        seconds = float(np.float32(seconds))
    times = tuple(i / choice.fps for i in frames)
    patches = -(-len(frames) // settings.temporal_patch_size)
    return FramePlan(
        policy=policy.name,
        settings=settings.to_dict(),
        indices=frames,
        timestamps=times,
        fps=choice.fps,
        fps_assumed=choice.fps_assumed,
        total_frames=info.total_frames,
        counted_frames=counted,
        source_size=(info.width, info.height),
        loaded_size=loaded,
        size=size,
        grid_thw=(patches, size[1] // settings.patch_size, size[0] // settings.patch_size),
        second_per_grid_ts=seconds,
        patch_timestamps=written_timestamps(family, times, settings.temporal_patch_size),
        container_timestamps=_real_times(info, frames),
    )


def _refuse_missing_frames(
    policy: Policy, settings: Settings, info: VideoInfo, frames: Sequence[int]
) -> None:
    held = info.total_frames if info.held_frames is None else info.held_frames
    if frames and frames[-1] >= held:
        raise policy.error(
            f"reader {settings.reader!r} counts {info.total_frames} frames, but frame {frames[-1]} is beyond "
            f"the {held} that the stream holds",
            "set reader='container' on both sides",
        )


def _sizes(
    policy: Policy, settings: Settings, info: VideoInfo, choice: Choice
) -> tuple[Size, Size]:
    """Sizes that the loader and the processor make."""
    assert settings.patch_size and settings.merge_size
    loaded = (info.width, info.height) if choice.loaded_size is None else choice.loaded_size
    size = loaded
    if choice.resize:
        size = processed_size(policy, settings, len(choice.indices), loaded)
    for width, height in (loaded, size):
        if width * height > Limits.max_pixels:
            raise policy.error(
                f"frames of {width} × {height} are not pictures", "pass a smaller size"
            )
    unit = settings.patch_size * settings.merge_size
    if size[0] % unit or size[1] % unit:
        raise policy.error(
            f"frames of {size[0]} x {size[1]} can't be cut into merged patches of {unit}",
            "set do_resize=true, or the model's image_patch_size",
        )
    return loaded, size


def _real_times(info: VideoInfo, frames: Sequence[int]) -> tuple[float, ...] | None:
    if info.timestamps is None:
        return None
    return tuple(float(info.timestamps[i]) for i in frames)


def _info(given: Any) -> VideoInfo:
    if isinstance(given, bytes | bytearray | memoryview | str | os.PathLike):
        return probe(given)
    if not isinstance(given, VideoInfo):
        raise ArgumentError(
            f"sample: {type(given).__name__} is not a video. Fix: pass a file's bytes, its path, or mp.video.probe(…)"
        )
    return given
