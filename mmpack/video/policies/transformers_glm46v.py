"""transformers' Glm46VVideoProcessor (GLM-4.6V): 6, 2 or 1 frames per second, fewer the longer the video, 640 at most.

What it finds it spreads evenly where there are more or fewer than it wanted. Pixels are bounded as GLM-4.1V's are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpack.video.info import VideoInfo
from mmpack.video.policies import transformers_glm4v as glm4v
from mmpack.video.policies.base import Choice, Policy, ProcessorSettings

RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))  # up to so many seconds, so many temporal patches each
MAX_FRAMES = 640


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    model: str = "glm46v"
    do_sample_frames: bool = True


def complete(settings: Settings) -> Settings:
    """Raises: ArgumentError."""
    one: Settings = glm4v.one_rule(POLICY, settings)
    return one


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    if not settings.do_sample_frames:
        return glm4v.every_frame(info)
    fps, total, patch = (
        glm4v.known_fps(POLICY, info),
        info.total_frames,
        settings.temporal_patch_size,
    )
    assert patch
    seconds = glm4v.seconds_of(info, fps)
    within = min(seconds, RATES[-1][0])
    rate = next(rate for most, rate in RATES if within <= most)
    wanted = min(int(within * rate * patch), MAX_FRAMES)
    if total < wanted:
        indices = _spread(0, total - 1, wanted)
    else:
        indices = _first_of_each(total, 1 / fps, 1 / (patch * rate), int(seconds))
    if len(indices) < wanted:
        low, high = (indices[0], indices[-1]) if indices else (0, max(total - 1, 0))
        indices = _spread(low, high, wanted)
    elif len(indices) > wanted:
        indices = _spread(0, total - 1, wanted)
    return Choice(glm4v.in_pairs(POLICY, indices), fps)


def _first_of_each(total: int, frame: float, step: float, seconds: int) -> list[int]:
    """The first frame at or after each step of time, until `seconds` are reached."""
    out: list[int] = []
    now = 0.0
    for i in range(total):
        if i * frame >= now:
            now += step
            out.append(i)
            if now >= seconds:
                break
    return out


def _spread(low: int, high: int, count: int) -> list[int]:
    found: list[int] = np.linspace(low, high, count, dtype=int).tolist()
    return found


POLICY = Policy(
    name="transformers_glm46v",
    settings=Settings,
    complete=complete,
    choose=choose,
)
