"""transformers' Qwen3VLVideoProcessor (Qwen3-VL, Qwen3.5): two frames per second, from the first to the last.

Positions are spaced in float64 and rounded, halves to even. Pixels are bounded over the whole video.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mmpack.video.info import VideoInfo
from mmpack.video.limits import Limits
from mmpack.video.policies.base import ASSUMED_FPS, Choice, Policy, ProcessorSettings

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
    """Two frames per second, unless another rate or a number is given. Raises: ArgumentError."""
    POLICY.refuse_both(settings, "fps", "num_frames")
    if settings.num_frames is None:
        return replace(settings, fps=settings.fps or FPS)
    return settings


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    fps = ASSUMED_FPS if info.fps is None else info.fps
    sampling = settings.do_sample_frames
    total = info.total_frames
    indices = _sampled(total, fps, settings) if sampling else np.arange(total)
    return Choice(indices, fps, fps_assumed=info.fps is None)


def _sampled(total: int, source: float, settings: Settings) -> np.ndarray:
    if settings.num_frames is None:
        assert settings.fps
        least, most = settings.min_frames, settings.max_frames
        return spread(total, frames_at(total, source, settings.fps, least, most))
    if settings.num_frames > Limits.max_frames:
        raise POLICY.error(
            f"num_frames is {settings.num_frames}, more than the {Limits.max_frames} that a video may have",
            "set fewer frames",
        )
    return spread(total, settings.num_frames)


def frames_at(total: int, source: float, fps: float, least: int, most: int) -> int:
    """How many frames `fps` per second are, between `least` and `most`. Raises: ArgumentError."""
    wanted = total / source * fps
    if not math.isfinite(wanted):  # upstream can't make it a number of frames either
        raise POLICY.error(f"fps={fps:.6g} is too large for {total} frames", "set a smaller fps")
    return min(max(int(wanted), least), most, total)


def spread(total: int, count: int) -> np.ndarray:
    """int64 [count] from the first frame to the last; frames repeat where there are fewer than `count`."""
    return np.linspace(0, total - 1, count).round().astype(np.int64)


POLICY = Policy(
    name="transformers_qwen3_vl",
    settings=Settings,
    complete=complete,
    choose=choose,
)
