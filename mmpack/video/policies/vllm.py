"""vLLM 0.32: its loader of video bytes (read by OpenCV, or by torchcodec), then the model's processor.

Qwen2-VL and Qwen3-VL have loaders of their own; `opencv` and `opencv_dynamic` are those of all other models. A loader
that took every frame lets Qwen3-VL's processor choose among them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.families import get_family
from mmpack.video.info import VideoInfo
from mmpack.video.limits import Limits
from mmpack.video.policies import transformers_qwen2_vl as qwen2
from mmpack.video.policies import transformers_qwen3_vl as qwen3
from mmpack.video.policies.base import ASSUMED_FPS, Choice, Policy, ProcessorSettings

_MAX_FPS, _MAX_FRAMES, _MAX_SECONDS, _NUM_FRAMES = 30, 768, 300, 32
_READ_BY: dict[str, dict[str, Any]] = {  # settings that a loader reads, with their defaults
    "qwen2_vl": {"fps": 2.0, "min_frames": 4, "max_frames": _MAX_FRAMES},
    "qwen3_vl": {"fps": 2.0, "min_frames": 4, "max_frames": _MAX_FRAMES},
    "opencv": {"fps": None, "num_frames": _NUM_FRAMES},
    "opencv_dynamic": {"fps": 2.0, "max_duration": _MAX_SECONDS},
}


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    loader: str | None = None  # upstream's `video_backend`; None: the model's own
    fps: float | None = None
    num_frames: int | None = None  # the most; only of `opencv`
    min_frames: int | None = None
    max_frames: int | None = None
    max_duration: int | None = None  # seconds


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    family = get_family(settings.model)
    by_frame = family.video_layout == "frames"
    total = info.total_frames
    fps = ASSUMED_FPS if info.fps is None and settings.loader == "qwen3_vl" else info.fps
    indices = _loaded(info, fps or 0.0, settings)
    if not fps:  # the metadata say 0: only Qwen2-VL's processor, which is handed none, goes on
        if family.tokens_per_second is not None or by_frame:
            raise POLICY.error(
                "the container has no frame rate", "remux it, or set loader='qwen3_vl'"
            )
        fps = ASSUMED_FPS
    if by_frame and len(indices) == total:
        count = qwen3.frames_at(total, fps, qwen3.FPS, qwen3.MIN_FRAMES, qwen3.MAX_FRAMES)
        indices = qwen3.spread(total, count)
    assumed = info.fps is None
    return Choice(indices, fps, assumed, hides_guess=assumed, float32_seconds=True)


def complete(settings: Settings) -> Settings:
    """The loader, with its defaults. Raises: ArgumentError."""
    loader = settings.loader
    if loader is None:
        own = get_family(settings.model).video_layout == "frames"
        loader = "qwen3_vl" if own else "qwen2_vl"
    if loader not in _READ_BY:
        raise POLICY.error(f"loader {loader!r:.40} is unknown", f"use one of {', '.join(_READ_BY)}")
    read = _READ_BY[loader]
    for name in ("fps", "num_frames", "min_frames", "max_frames", "max_duration"):
        if name not in read and getattr(settings, name) is not None:
            raise POLICY.error(f"loader {loader!r} reads no {name}", f"use {', '.join(read)}")
    return Settings(**(read | settings.to_dict() | {"loader": loader}))


def _loaded(info: VideoInfo, fps: float, settings: Settings) -> np.ndarray:
    """int64: the loader's frames, without those that it can't read."""
    seconds = info.total_frames / fps if fps else 0.0
    if settings.reader == "torchcodec" and info.readings:
        seconds = info.duration
    indices = _LOAD[str(settings.loader)](info.total_frames, fps, seconds, settings)
    return indices if info.held_frames is None else indices[indices < info.held_frames]


def _qwen2_vl(total: int, source: float, seconds: float, settings: Settings) -> np.ndarray:
    """transformers' steps, a frame past the end taken as the last one, and each frame once."""
    assert settings.fps and settings.min_frames and settings.max_frames
    if not source:
        raise POLICY.error("the container has no frame rate", "set loader='opencv', or remux it")
    fps, most = min(settings.fps, _MAX_FPS), min(settings.max_frames, _MAX_FRAMES)
    count = qwen2.frames_at(total, source, fps, settings.min_frames, most, 2)
    if count < 1:
        raise POLICY.error(
            f"a clip of {total} frame is less than a temporal patch", "pass it as an image"
        )
    return np.unique(np.minimum(qwen2.spaced(total, count), total - 1))


def _qwen3_vl(total: int, source: float, seconds: float, settings: Settings) -> np.ndarray:
    assert settings.fps and settings.min_frames and settings.max_frames
    most = min(settings.max_frames, _MAX_FRAMES)
    fps = min(settings.fps, _MAX_FPS)
    return qwen3.spread(total, qwen3.frames_at(total, source, fps, settings.min_frames, most))


def _opencv(total: int, source: float, seconds: float, settings: Settings) -> np.ndarray:
    """At most `num_frames` and at most `fps` per second, spaced evenly and rounded down."""
    assert settings.num_frames
    count = min(settings.num_frames, total)
    if settings.fps:
        count = math.floor(min(count, seconds * settings.fps))
    count = max(1, count)
    return np.arange(total) if count == total else np.linspace(0, total - 1, count, dtype=np.int64)


def _opencv_dynamic(total: int, source: float, seconds: float, settings: Settings) -> np.ndarray:
    """The first frame at or after each step of time; a long clip is spaced evenly over all its seconds."""
    assert settings.fps and settings.max_duration
    fps, last = settings.fps, total - 1
    if seconds <= settings.max_duration:
        if seconds * fps > Limits.max_frames:  # upstream goes through each step
            raise POLICY.error(
                f"fps={fps:.6g} is more than {Limits.max_frames} steps in {seconds:.3g} seconds",
                "set a smaller fps",
            )
        steps = range(math.floor(seconds * fps))
        indices = {min(last, math.ceil(k * source / fps)) for k in steps}
    elif settings.max_duration * fps >= total:
        return np.arange(total)
    else:
        times = np.linspace(0, seconds, int(settings.max_duration * fps))
        indices = {min(last, math.ceil(t * source)) for t in times}
    if not indices:
        raise POLICY.error(
            f"{fps:.6g} frames per second of {seconds:.3g} seconds are none", "set a higher fps"
        )
    return np.asarray(sorted(indices), dtype=np.int64)


_LOAD = {
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "opencv": _opencv,
    "opencv_dynamic": _opencv_dynamic,
}

POLICY = Policy(
    name="vllm",
    settings=Settings,
    complete=complete,
    choose=choose,
    reader="opencv",
    checks_end=True,
)
