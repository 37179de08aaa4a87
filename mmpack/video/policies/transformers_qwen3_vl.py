"""transformers' Qwen3VLVideoProcessor (Qwen3-VL, Qwen3.5): two frames a second, from the first to the last.

Positions are spaced in float64 and rounded, halves to even. Pixels are bounded over the whole video.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mmpack.video.frame_plan import FramePlan
from mmpack.video.limits import Limits
from mmpack.video.policies.base import ASSUMED_FPS, Policy, ProcessorSettings, finish, models_of

if TYPE_CHECKING:
    from mmpack.video.info import VideoInfo

FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    model: str = "qwen3_vl"
    do_sample_frames: bool = True
    fps: float | None = None  # None: 2, unless `num_frames` is set
    num_frames: int | None = None
    min_frames: int = MIN_FRAMES
    max_frames: int = MAX_FRAMES


def complete(settings: Settings) -> Settings:
    """Two frames a second, unless told otherwise. Raises: ArgumentError."""
    if settings.fps is not None and settings.num_frames is not None:
        raise POLICY.error("fps and num_frames are both set", "set one of them")
    if settings.num_frames is None:
        return replace(settings, fps=settings.fps or FPS)
    return settings


def choose(info: VideoInfo, settings: Settings) -> FramePlan:
    """The plan of `info`. Raises: ArgumentError where upstream raises."""
    total = info.total_frames
    fps = ASSUMED_FPS if info.fps is None else info.fps
    if not settings.do_sample_frames:
        indices = np.arange(total)
    elif settings.num_frames is not None:
        if settings.num_frames > Limits.max_frames:
            raise POLICY.error(
                f"num_frames is {settings.num_frames}, more than the {Limits.max_frames} that a video may have",
                "fewer frames",
            )
        indices = spread(total, settings.num_frames)
    else:
        assert settings.fps
        count = frames_at(total, fps, settings.fps, settings.min_frames, settings.max_frames)
        indices = spread(total, count)
    return finish(POLICY, settings, info, indices, fps=fps, fps_assumed=info.fps is None)


def frames_at(total: int, source: float, fps: float, least: int, most: int) -> int:
    """How many frames `fps` a second are, between `least` and `most`. Raises: ArgumentError."""
    wanted = total / source * fps
    if not math.isfinite(wanted):  # upstream can't make it a number of frames either
        raise POLICY.error(f"fps={fps:.6g} is too large for {total} frames", "a smaller fps")
    return min(max(int(wanted), least), most, total)


def spread(total: int, count: int) -> np.ndarray:
    """int64 [count] from the first frame to the last; frames repeat where there are fewer than `count`."""
    return np.linspace(0, total - 1, count).round().astype(np.int64)


POLICY = Policy(
    name="transformers_qwen3_vl",
    about="transformers' video processor of Qwen3-VL and Qwen3.5",
    settings=Settings,
    complete=complete,
    choose=choose,
    models=models_of("frames"),
    reader="torchcodec",
)
