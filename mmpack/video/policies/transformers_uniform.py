"""transformers' BaseVideoProcessor, as Gemma 4 has it: a number of frames, spaced evenly from the first.

Positions are whole quotients (transformers 5.19 and later). Each frame is resized by itself, to a budget of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mmpack.video.info import VideoInfo
from mmpack.video.limits import Limits
from mmpack.video.policies.base import ASSUMED_FPS, Choice, Policy, ProcessorSettings

NUM_FRAMES = 32


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    model: str = "gemma4"
    do_sample_frames: bool = True
    fps: float | None = None
    num_frames: int | None = None  # None: 32, unless `fps` is set


def complete(settings: Settings) -> Settings:
    """32 frames, unless a rate or another number is given. Raises: ArgumentError."""
    POLICY.refuse_both(settings, "fps", "num_frames")
    if settings.fps is None and settings.num_frames is None:
        return replace(settings, num_frames=NUM_FRAMES)
    return settings


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    fps = ASSUMED_FPS if info.fps is None else info.fps
    total = info.total_frames
    indices = _sampled(info, settings) if settings.do_sample_frames else np.arange(total)
    return Choice(indices, fps, fps_assumed=info.fps is None)


def _sampled(info: VideoInfo, settings: Settings) -> np.ndarray:
    total, count = info.total_frames, settings.num_frames
    if count is None:
        if info.fps is None:
            raise POLICY.error("fps is set, but the container has no frame rate", "set num_frames")
        assert settings.fps
        count = max(1, int(total / info.fps * settings.fps))
    if count > min(total, Limits.max_frames):
        raise POLICY.error(
            f"{count} frames wanted of {total} (at most {Limits.max_frames})",
            "set a smaller num_frames or fps, or do_sample_frames=false for every frame",
        )
    return np.arange(count) * total // count


POLICY = Policy(name="transformers_uniform", settings=Settings, complete=complete, choose=choose)
