"""transformers' Qwen2VLVideoProcessor (Qwen2-VL, Qwen2.5-VL): every frame, or frames spaced evenly from the first.

It steps by total / count in float32 and drops the fraction. Pixels are bounded frame by frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mmpack.video.info import VideoInfo
from mmpack.video.policies.base import ASSUMED_FPS, Choice, Policy, ProcessorSettings
from mmpack.video.policies.float32 import torch_arange


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    # None: if `fps` or `num_frames` is given, as in its chat template
    do_sample_frames: bool | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768


def complete(settings: Settings) -> Settings:
    """It samples where a rate or a number is given. Raises: ArgumentError."""
    POLICY.refuse_both(settings, "fps", "num_frames")
    given = settings.fps is not None or settings.num_frames is not None
    if settings.do_sample_frames and not given:
        raise POLICY.error("do_sample_frames without fps or num_frames", "set one of them")
    if settings.do_sample_frames is None:
        return replace(settings, do_sample_frames=given)
    return settings


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    sampling = settings.do_sample_frames
    indices = _sampled(info, settings) if sampling else np.arange(info.total_frames)
    fps = ASSUMED_FPS if info.fps is None else info.fps
    return Choice(indices, fps, fps_assumed=info.fps is None)


def _sampled(info: VideoInfo, settings: Settings) -> np.ndarray:
    total, patch = info.total_frames, settings.temporal_patch_size
    assert patch
    if settings.num_frames is not None:
        count = round(settings.num_frames / patch) * patch
    elif info.fps is None:
        raise POLICY.error("fps is set, but the container has no frame rate", "set num_frames")
    else:
        assert settings.fps
        count = frames_at(
            total, info.fps, settings.fps, settings.min_frames, settings.max_frames, patch
        )
    if not 0 < count <= total:
        raise POLICY.error(
            f"{count} frames wanted of {total} (whole temporal patches of {patch})",
            "set another fps or num_frames, or do_sample_frames=false for every frame",
        )
    indices = spaced(total, count)
    if indices[-1] >= total:
        raise POLICY.error(
            f"transformers' steps for {count} frames end at frame {indices[-1]} of {total}, which it can't read",
            "set another fps or num_frames, or use the policy vllm, which takes the last frame instead",
        )
    return indices


def frames_at(total: int, source: float, fps: float, least: int, most: int, patch: int) -> int:
    """How many frames `fps` per second are, between `least` and `most`, in whole temporal patches."""
    most = math.floor(min(most, total) / patch) * patch
    return math.floor(min(max(total / source * fps, least), most, total) / patch) * patch


def spaced(total: int, count: int) -> np.ndarray:
    """int64: upstream's steps from frame 0; there can be one more than `count`, and it can be `total`."""
    return torch_arange(total, total / count).astype(np.int64)


POLICY = Policy(
    name="transformers_qwen2_vl",
    settings=Settings,
    complete=complete,
    choose=choose,
)
