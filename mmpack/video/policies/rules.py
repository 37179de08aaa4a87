"""Rules by which upstream's functions choose frames: numbers of frames, ascending, to the last bit as there.

Each raises ArgumentError where upstream raises, and where it would go through more frames than a video may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mmpack.families import get_family
from mmpack.video.info import VideoInfo
from mmpack.video.limits import Limits
from mmpack.video.policies.base import ASSUMED_FPS, Policy, Settings
from mmpack.video.policies.processor import checked_size
from mmpack.video.policies.resize import Size, utils_size

_NO_RATE = "the container has no frame rate"

# qwen-vl-utils
_FACTOR, _MERGE, _MIN_FRAMES, _MAX_FRAMES = 2, 2, 4, 768
_FRAME_TOKENS, _SIDE_TOKENS, _CONTEXT = (128, 768), (4, 16384), 128_000
# GLM-4.6V: up to so many seconds, so many temporal patches each
_RATES, _MOST_OF_GLM46V = ((30, 3.0), (300, 1.0), (2400, 0.5)), 640
_MAX_FPS = 30  # vLLM


def even_count(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """qwen-vl-utils: an even number, from the first to the last, rounded in float32."""
    if info.fps is None:
        raise policy.error(_NO_RATE, "use the policy transformers_qwen3_vl, or remux it")
    first, last = policy.frame_range(info.total_frames, info.fps, settings)
    total = last - first + 1
    if settings.nframes is not None:
        count = round(settings.nframes / _FACTOR) * _FACTOR
    else:
        assert settings.fps
        least, most = settings.min_frames, settings.max_frames
        least = math.ceil((_MIN_FRAMES if least is None else least) / _FACTOR) * _FACTOR
        most = math.floor((min(_MAX_FRAMES, total) if most is None else most) / _FACTOR) * _FACTOR
        wanted = min(max(total / info.fps * settings.fps, least), most, total)
        count = math.floor(wanted / _FACTOR) * _FACTOR
    if total < _FACTOR:
        raise policy.error(
            f"the clip has {total} of the {_FACTOR} frames that it takes at least",
            "pass it as an image",
        )
    if not _FACTOR <= count <= total:
        raise policy.error(
            f"{count} frames wanted, but it takes {_FACTOR} to {total} of this clip",
            "set another nframes, fps or max_frames",
        )
    return np.round(torch_linspace(first, last, count)).astype(np.int64)


def complete_utils(policy: Policy, settings: Settings) -> Settings:
    """qwen-vl-utils' own sizes; whether the processor resizes again is as the model cards have it."""
    patch = settings.image_patch_size or settings.patch_size
    assert patch
    return settings.with_defaults(
        image_patch_size=patch,
        do_resize=get_family(settings.model).video_layout == "single",
        frame_min_pixels=_FRAME_TOKENS[0] * (patch * _MERGE) ** 2,
        total_pixels=_CONTEXT * (patch * _MERGE) * (patch * _MERGE) * 0.9,
    )


def utils_load(policy: Policy, size: Size, frames: int, settings: Settings) -> Size:
    """qwen-vl-utils' resize: by a budget for the whole video."""
    assert settings.image_patch_size and settings.frame_min_pixels and settings.total_pixels
    factor = settings.image_patch_size * _MERGE
    if settings.resized_width is not None and settings.resized_height is not None:
        asked = (settings.resized_width, settings.resized_height)
        low, high = (tokens * factor**2 for tokens in _SIDE_TOKENS)
        return checked_size(policy, utils_size(asked, factor, low, high), asked)
    low = settings.frame_min_pixels
    share = min(_FRAME_TOKENS[1] * factor * factor, settings.total_pixels / frames * _FACTOR)
    limit = max(share, int(low * 1.05))
    most = limit if settings.frame_max_pixels is None else min(settings.frame_max_pixels, limit)
    if most < low:
        raise policy.error(
            f"frame_max_pixels={most} is below frame_min_pixels={low}", "set both, in this order"
        )
    return checked_size(policy, utils_size(size, factor, low, most), size)


def steps(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """Qwen2-VL's processor: steps of total / count in float32 from the first, the fraction dropped."""
    total, patch = info.total_frames, settings.temporal_patch_size
    assert patch
    if settings.num_frames is not None:
        count = round(settings.num_frames / patch) * patch
    else:
        assert settings.fps and settings.min_frames and settings.max_frames
        limits = (settings.min_frames, settings.max_frames)
        count = _whole_patches(total, _needed_fps(policy, info), settings.fps, *limits, patch)
    if not 0 < count <= total:
        raise policy.error(
            f"{count} frames wanted of {total} (whole temporal patches of {patch})",
            "set another fps or num_frames, or do_sample_frames=false for every frame",
        )
    indices = _stepped(total, count)
    if indices[-1] >= total:
        raise policy.error(
            f"transformers' steps for {count} frames end at frame {indices[-1]} of {total}, which it can't read",
            "set another fps or num_frames, or use the policy vllm, which takes the last frame instead",
        )
    return indices


def complete_steps(policy: Policy, settings: Settings) -> Settings:
    """Qwen2-VL's processor samples where a rate or a number is given, as in its chat template."""
    given = settings.fps is not None or settings.num_frames is not None
    if settings.do_sample_frames and not given:
        raise policy.error("do_sample_frames without fps or num_frames", "set one of them")
    return settings.with_defaults(do_sample_frames=given)


def spread(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """Qwen3-VL's processor: from the first to the last, spaced in float64 and rounded, halves to even.

    Frames repeat where there are fewer than asked for.
    """
    total, count = info.total_frames, settings.num_frames
    if count is None:
        assert settings.fps and settings.min_frames and settings.max_frames
        wanted = total / (info.fps or ASSUMED_FPS) * settings.fps
        if not math.isfinite(wanted):  # upstream can't make it a number of frames either
            raise policy.error(
                f"fps={settings.fps:.6g} is too large for {total} frames", "set a smaller fps"
            )
        count = min(max(int(wanted), settings.min_frames), settings.max_frames, total)
    elif count > Limits.max_frames:
        raise policy.error(
            f"num_frames is {count}, more than the {Limits.max_frames} that a video may have",
            "set fewer frames",
        )
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def uniform(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """transformers' BaseVideoProcessor: whole quotients, from the first (transformers 5.19 and later)."""
    total, count = info.total_frames, settings.num_frames
    if count is None:
        assert settings.fps
        count = max(1, int(total / _needed_fps(policy, info) * settings.fps))
    if count > min(total, Limits.max_frames):
        raise policy.error(
            f"{count} frames wanted of {total} (at most {Limits.max_frames})",
            "set a smaller num_frames or fps, or do_sample_frames=false for every frame",
        )
    return np.arange(count) * total // count


def in_time(policy: Policy, info: VideoInfo, settings: Settings) -> list[int]:
    """GLM-4.1V's processor: each frame where its time begins; none comes twice but the last, in pairs."""
    assert settings.fps and settings.max_duration
    fps, seconds, last = *_clock(policy, info), info.total_frames - 1
    count = min(seconds, settings.max_duration) * settings.fps
    if count >= Limits.max_frames + 1:
        raise policy.error(f"fps={settings.fps:.6g} makes too many frames", "set a smaller fps")
    if seconds <= settings.max_duration:
        wanted = range(max(math.floor(count), 1))
        indices = [min(last, math.ceil(i * fps / settings.fps)) for i in wanted]
    elif int(count) > last:
        indices = list(range(last + 1))
    else:
        times = np.linspace(0, seconds, int(count), endpoint=True)
        indices = [min(last, math.ceil(t * fps)) for t in times]
    return _in_pairs(policy, indices)


def by_length(policy: Policy, info: VideoInfo, settings: Settings) -> list[int]:
    """GLM-4.6V's processor: the longer the video, the fewer a second; spread evenly if it finds another number."""
    fps, seconds, total = *_clock(policy, info), info.total_frames
    patch = settings.temporal_patch_size
    assert patch
    within = min(seconds, _RATES[-1][0])
    rate = next(rate for most, rate in _RATES if within <= most)
    wanted = min(int(within * rate * patch), _MOST_OF_GLM46V)
    indices: list[int] = []
    now, frame, step = 0.0, 1 / fps, 1 / (patch * rate)
    for i in range(total if total >= wanted else 0):
        if i * frame >= now:
            now += step
            indices.append(i)
            if now >= int(seconds):
                break
    if len(indices) != wanted:
        whole = total < wanted or len(indices) > wanted or not indices
        low, high = (0, total - 1) if whole else (indices[0], indices[-1])
        indices = np.linspace(low, high, wanted, dtype=int).tolist()
    return _in_pairs(policy, indices)


def as_loaded(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """vLLM: frames of its loader that can be read. Qwen3-VL's processor chooses again among all, if it got all."""
    family, loader = get_family(settings.model), str(settings.loader)
    by_frame, total = family.video_layout == "frames", info.total_frames
    fps = info.fps or (ASSUMED_FPS if loader == "qwen3_vl" else None)
    seconds = total / fps if fps else 0.0
    if settings.reader == "torchcodec" and info.readings:
        seconds = info.duration
    if settings.fps and settings.max_frames:  # of the loaders that read both
        most = min(settings.max_frames, _MAX_FRAMES)
        settings = replace(settings, fps=min(settings.fps, _MAX_FPS), max_frames=most)
    indices = _LOADERS[loader][1](policy, replace(info, fps=fps, duration=seconds), settings)
    if info.held_frames is not None:
        indices = indices[indices < info.held_frames]
    # the metadata say 0: only Qwen2-VL's processor, which is handed none, goes on
    if not fps and (family.tokens_per_second is not None or by_frame):
        raise policy.error(_NO_RATE, "remux it, or set loader='qwen3_vl'")
    if by_frame and len(indices) == total:
        own = Settings(fps=2.0, min_frames=4, max_frames=_MAX_FRAMES)
        indices = spread(policy, replace(info, fps=fps), own)
    return indices


def complete_loader(policy: Policy, settings: Settings) -> Settings:
    """vLLM's loader, the model's own if none is named, with its defaults. Raises: ArgumentError."""
    own = get_family(settings.model).video_layout == "frames"
    loader = settings.loader or ("qwen3_vl" if own else "qwen2_vl")
    if loader not in _LOADERS:
        raise policy.error(f"loader {loader!r:.40} is unknown", f"use one of {', '.join(_LOADERS)}")
    read = _LOADERS[loader][0]
    for name in ("fps", "num_frames", "min_frames", "max_frames", "max_duration"):
        if name not in read and getattr(settings, name) is not None:
            raise policy.error(f"loader {loader!r} reads no {name}", f"use {', '.join(read)}")
    return replace(settings.with_defaults(**read), loader=loader)


def _unique_steps(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """transformers' steps, a frame past the end taken as the last one, and each frame once."""
    assert settings.fps and settings.min_frames and settings.max_frames
    if not info.fps:
        raise policy.error(_NO_RATE, "set loader='opencv', or remux it")
    total, limits = info.total_frames, (settings.min_frames, settings.max_frames)
    count = _whole_patches(total, info.fps, settings.fps, *limits, 2)
    if count < 1:
        raise policy.error(
            f"a clip of {total} frame is less than a temporal patch", "pass it as an image"
        )
    return np.unique(np.minimum(_stepped(total, count), total - 1))


def _evenly(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """At most `num_frames` and at most `fps` per second, spaced evenly and rounded down."""
    assert settings.num_frames
    total = info.total_frames
    count = min(settings.num_frames, total)
    if settings.fps:
        count = math.floor(min(count, info.duration * settings.fps))
    count = max(1, count)
    return np.arange(total) if count == total else np.linspace(0, total - 1, count, dtype=np.int64)


def _by_time(policy: Policy, info: VideoInfo, settings: Settings) -> np.ndarray:
    """The first frame at or after each step of time; a long clip is spaced evenly over all its seconds."""
    assert settings.fps and settings.max_duration
    total, source, seconds = info.total_frames, info.fps or 0.0, info.duration
    fps, last = settings.fps, total - 1
    if seconds <= settings.max_duration:
        if seconds * fps > Limits.max_frames:  # upstream goes through each step
            raise policy.error(
                f"fps={fps:.6g} is more than {Limits.max_frames} steps in {seconds:.3g} seconds",
                "set a smaller fps",
            )
        indices = {min(last, math.ceil(k * source / fps)) for k in range(math.floor(seconds * fps))}
    elif settings.max_duration * fps >= total:
        return np.arange(total)
    else:
        times = np.linspace(0, seconds, int(settings.max_duration * fps))
        indices = {min(last, math.ceil(t * source)) for t in times}
    if not indices:
        raise policy.error(
            f"{fps:.6g} frames per second of {seconds:.3g} seconds are none", "set a higher fps"
        )
    return np.asarray(sorted(indices), dtype=np.int64)


_QWEN = {"fps": 2.0, "min_frames": 4, "max_frames": _MAX_FRAMES}
# vLLM's loaders: the settings that they read, with their defaults. Qwen2-VL and Qwen3-VL have their own, all other
# models the others.
_LOADERS: dict[str, tuple[dict[str, Any], Callable[[Policy, VideoInfo, Settings], np.ndarray]]] = {
    "qwen2_vl": (_QWEN, _unique_steps),
    "qwen3_vl": (_QWEN, spread),
    "opencv": ({"fps": None, "num_frames": 32}, _evenly),
    "opencv_dynamic": ({"fps": 2.0, "max_duration": 300}, _by_time),
}


def _needed_fps(policy: Policy, info: VideoInfo) -> float:
    if info.fps is None:
        raise policy.error(f"fps is set, but {_NO_RATE}", "set num_frames")
    return info.fps


def _clock(policy: Policy, info: VideoInfo) -> tuple[float, float]:
    """Rate and seconds: a video's length as its reader says it, else as GLM's processors count it."""
    if info.fps is None:
        raise policy.error(_NO_RATE, "remux it, or set do_sample_frames=false for every frame")
    return info.fps, info.duration or round((info.total_frames - 1) / info.fps) + 1


def _in_pairs(policy: Policy, indices: list[int]) -> list[int]:
    """Each frame once, the last again where their number is odd. Raises: ArgumentError for none."""
    unique = list(dict.fromkeys(indices))
    if not unique:
        raise policy.error(
            "it takes no frame of a video this short", "pass a longer one, or its frames"
        )
    return unique + unique[-1:] * (len(unique) % 2)


def _whole_patches(total: int, source: float, fps: float, least: int, most: int, patch: int) -> int:
    """How many frames `fps` per second are, between `least` and `most`, in whole temporal patches."""
    most = math.floor(min(most, total) / patch) * patch
    return math.floor(min(max(total / source * fps, least), most, total) / patch) * patch


def _stepped(total: int, count: int) -> np.ndarray:
    """Qwen2-VL's steps from frame 0; there can be one more than `count`, and it can be `total`."""
    return torch_arange(total, total / count).astype(np.int64)


_LANES, _UNROLLED = 8, 16  # of AVX2, which these two use on every x86 machine


def torch_arange(stop: int, step: float) -> np.ndarray:
    """float32 `torch.arange(0, stop, step)`; its last value can be `stop` itself."""
    i = np.arange(math.ceil(stop / step))
    block = i // _LANES * _LANES
    start = (block * step).astype(np.float32).astype(np.float64)
    in_blocks = i < len(i) // _UNROLLED * _UNROLLED
    return np.where(in_blocks, start + (i - block) * step, i * step).astype(np.float32)


def torch_linspace(start: int, stop: int, count: int) -> np.ndarray:
    """float32 `torch.linspace(start, stop, count)`: from both ends to the middle, each product added unrounded."""
    first, last = np.float64(np.float32(start)), np.float64(np.float32(stop))
    if count == 1:
        return np.asarray([first], dtype=np.float32)
    step = np.float32(np.float32(last - first) / np.float32(count - 1)).astype(np.float64)
    i = np.arange(count)
    rising, falling = first + step * i, last - step * (count - 1 - i)
    return np.where(i < count // 2, rising, falling).astype(np.float32)
