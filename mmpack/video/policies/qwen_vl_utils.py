"""qwen-vl-utils 0.0.14: `fetch_video`, and what the model's processor makes of its frames.

It takes an even number of frames, two per second, from the first to the last, and resizes by a budget for the whole
video. The processor resizes once more unless `do_resize` is off, as in the model cards of Qwen3-VL. Its readers decord,
torchcodec and torchvision (gone in torchvision 0.28) take the same frames; torchvision's start and end do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmpack.families import get_family
from mmpack.video.info import VideoInfo
from mmpack.video.policies.base import Choice, Policy, ProcessorSettings
from mmpack.video.policies.float32 import torch_linspace
from mmpack.video.policies.processor import checked_size
from mmpack.video.policies.resize import Size, utils_size

_FACTOR, _MERGE, _FPS, _MIN_FRAMES, _MAX_FRAMES = 2, 2, 2.0, 4, 768
_FRAME_TOKENS, _SIDE_TOKENS, _CONTEXT = (128, 768), (4, 16384), 128_000


@dataclass(frozen=True)
class Settings(ProcessorSettings):
    image_patch_size: int | None = None  # None: the model's; upstream's own default is 14
    fps: float | None = None  # None: 2, unless `nframes` is set
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    frame_min_pixels: int | None = None  # upstream's `min_pixels` and `max_pixels`
    frame_max_pixels: int | None = None
    total_pixels: float | None = None
    resized_width: int | None = None
    resized_height: int | None = None
    video_start: float | None = None  # seconds
    video_end: float | None = None
    do_resize: bool | None = None  # the processor's; None: as the model cards have it


def choose(info: VideoInfo, settings: Settings) -> Choice:
    """Frames of `info`. Raises: ArgumentError where upstream raises."""
    if info.fps is None:
        raise POLICY.error(
            "the container has no frame rate", "use the policy transformers_qwen3_vl, or remux it"
        )
    first, last = frame_range(info.total_frames, info.fps, settings)
    count = _count(last - first + 1, info.fps, settings)
    indices = np.round(torch_linspace(first, last, count)).astype(np.int64)
    loaded = _resized((info.width, info.height), count, settings)
    return Choice(indices, info.fps, loaded_size=loaded, resize=bool(settings.do_resize))


def complete(settings: Settings) -> Settings:
    """Upstream's defaults in place of None. Raises: ArgumentError."""
    POLICY.refuse_both(settings, "fps", "nframes")
    assert settings.patch_size
    patch = settings.image_patch_size or settings.patch_size
    defaults = {
        "image_patch_size": patch,
        "do_resize": get_family(settings.model).video_layout == "single",  # as in the model cards
        "frame_min_pixels": _FRAME_TOKENS[0] * (patch * _MERGE) ** 2,
        "total_pixels": _CONTEXT * (patch * _MERGE) * (patch * _MERGE) * 0.9,
    }
    if settings.nframes is None:
        defaults["fps"] = _FPS
    return Settings(**(defaults | settings.to_dict()))


def frame_range(total: int, fps: float, settings: Settings) -> tuple[int, int]:
    """First and last frame between `video_start` and `video_end`."""
    first, last = 0, total - 1
    if settings.video_start is not None:
        first = math.ceil(max(0.0, min(settings.video_start, total / fps)) * fps)
    if settings.video_end is not None:
        last = min(math.floor(max(0.0, min(settings.video_end, total / fps)) * fps), last)
    cut = settings.video_start is not None or settings.video_end is not None
    if cut and first >= last:
        raise POLICY.error(
            f"video_start and video_end leave frames {first} to {last} of {total} at {fps:.6g} per second",
            "choose a longer range within the clip",
        )
    return first, last


def _count(total: int, source: float, settings: Settings) -> int:
    if settings.nframes is not None:
        count = round(settings.nframes / _FACTOR) * _FACTOR
    else:
        assert settings.fps
        least, most = settings.min_frames, settings.max_frames
        least = math.ceil((_MIN_FRAMES if least is None else least) / _FACTOR) * _FACTOR
        most = math.floor((min(_MAX_FRAMES, total) if most is None else most) / _FACTOR) * _FACTOR
        wanted = min(max(total / source * settings.fps, least), most, total)
        count = math.floor(wanted / _FACTOR) * _FACTOR
    if total < _FACTOR:
        raise POLICY.error(
            f"the clip has {total} of the {_FACTOR} frames that it takes at least",
            "pass it as an image",
        )
    if not _FACTOR <= count <= total:
        raise POLICY.error(
            f"{count} frames wanted, but it takes {_FACTOR} to {total} of this clip",
            "set another nframes, fps or max_frames",
        )
    return count


def _resized(size: Size, frames: int, settings: Settings) -> Size:
    assert settings.image_patch_size and settings.frame_min_pixels and settings.total_pixels
    factor = settings.image_patch_size * _MERGE
    if settings.resized_width is not None and settings.resized_height is not None:
        asked = (settings.resized_width, settings.resized_height)
        low, high = (tokens * factor**2 for tokens in _SIDE_TOKENS)
        return checked_size(POLICY, utils_size(asked, factor, low, high), asked)
    low = settings.frame_min_pixels
    share = min(_FRAME_TOKENS[1] * factor * factor, settings.total_pixels / frames * _FACTOR)
    limit = max(share, int(low * 1.05))
    most = limit if settings.frame_max_pixels is None else min(settings.frame_max_pixels, limit)
    if most < low:
        raise POLICY.error(
            f"frame_max_pixels={most} is below frame_min_pixels={low}", "set both, in this order"
        )
    return checked_size(POLICY, utils_size(size, factor, low, most), size)


POLICY = Policy(
    name="qwen_vl_utils",
    settings=Settings,
    complete=complete,
    choose=choose,
    frame_range=frame_range,
)
