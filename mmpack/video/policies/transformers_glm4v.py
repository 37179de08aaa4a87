"""transformers' Glm4vVideoProcessor (GLM-4.1V, GLM-4.5V): two frames per second, each where its time begins.

No frame comes twice but the last, where their number is odd. Pixels are bounded over the whole video.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.video.info import VideoInfo
from mmpack.video.limits import Limits
from mmpack.video.policies.base import ASSUMED_FPS, Choice, Policy, ProcessorSettings

FPS, MAX_SECONDS = 2.0, 300


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    model: str = "glm4v"
    do_sample_frames: bool = True
    fps: float | None = None  # None: 2
    max_duration: int = MAX_SECONDS  # seconds; of longer videos as many frames are taken, evenly


def complete(settings: Settings) -> Settings:
    """Two frames per second, unless another rate is given. Raises: ArgumentError."""
    return replace(one_rule(POLICY, settings), fps=settings.fps or FPS)


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    if not settings.do_sample_frames:
        return every_frame(info)
    assert settings.fps
    fps, last = known_fps(POLICY, info), info.total_frames - 1
    seconds = seconds_of(info, fps)
    most = int(settings.max_duration * settings.fps)
    wanted = max(math.floor(seconds * settings.fps), 1)
    if max(most if seconds > settings.max_duration else wanted, 1) > Limits.max_frames:
        raise POLICY.error(f"fps={settings.fps:.6g} makes too many frames", "set a smaller fps")
    if seconds <= settings.max_duration:
        indices = [min(last, math.ceil(i * fps / settings.fps)) for i in range(wanted)]
    elif most > last:
        indices = list(range(last + 1))
    else:
        times = np.linspace(0, seconds, most, endpoint=True)
        indices = [min(last, math.ceil(t * fps)) for t in times]
    return Choice(in_pairs(POLICY, indices), fps)


def every_frame(info: VideoInfo) -> Choice:
    """All of them; of an unknown rate transformers takes its guess."""
    fps = ASSUMED_FPS if info.fps is None else info.fps
    return Choice(np.arange(info.total_frames), fps, fps_assumed=info.fps is None)


def known_fps(policy: Policy, info: VideoInfo) -> float:
    """The file's rate. Raises: ArgumentError where the container has none."""
    if info.fps is None:
        raise policy.error(
            "the container has no frame rate",
            "remux it, or set do_sample_frames=false for every frame",
        )
    return info.fps


def seconds_of(info: VideoInfo, fps: float) -> float:
    """A video's length as its reader says it; else as upstream counts it."""
    return info.duration or round((info.total_frames - 1) / fps) + 1


def in_pairs(policy: Policy, indices: list[int]) -> np.ndarray:
    """int64: each frame once, the last again where their number is odd. Raises: ArgumentError for none."""
    unique = list(dict.fromkeys(indices))
    if not unique:
        raise policy.error(
            "it takes no frame of a video this short", "pass a longer one, or its frames"
        )
    return np.asarray(unique + unique[-1:] * (len(unique) % 2), dtype=np.int64)


def one_rule(policy: Policy, settings: Any) -> Any:
    """GLM's resize never changed, and has no budget for frames. Raises: ArgumentError where one is set."""
    if settings.cap_pixels_per_frame or settings.max_video_tokens is not None:
        raise policy.error(
            "the model's processor has no budget for frames", "leave out cap_pixels_per_frame"
        )
    return replace(settings, transformers="5.15")


POLICY = Policy(
    name="transformers_glm4v",
    settings=Settings,
    complete=complete,
    choose=choose,
)
