"""What a policy is: its name, its settings with their defaults, and the function that chooses.

Every policy ends in the model's processor, which resizes and counts patches: `finish` does that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import FAMILIES, Family, get_family
from mmpack.video.frame_plan import FramePlan
from mmpack.video.limits import Limits
from mmpack.video.policies.resize import qwen2_size, qwen3_size
from mmpack.video.readers import READERS
from mmpack.video.values import read_value

if TYPE_CHECKING:
    from mmpack.video.info import VideoInfo

Size = tuple[int, int]

ASSUMED_FPS = 24.0  # transformers' guess where a container has no frame rate
_ANY_SIGN = ("video_start", "video_end")
_SIZES = ("patch_size", "image_patch_size", "temporal_patch_size", "merge_size")
_LARGEST = 1024
AREAS = {  # area limits of released checkpoints: of a frame (single), of a whole video (frames)
    "single": (56 * 56, 16384 * 28 * 28),
    "frames": (64 * 64, 24576 * 32 * 32),
}
VIDEO_TOKENS = {"single": 128_000, "frames": 768}


@dataclass(frozen=True)
class ProcessorSettings:
    """Of the model's video processor; None: as its released checkpoints have it."""

    model: str = "qwen2_5_vl"  # a family's name
    min_pixels: int | None = None  # Qwen2-VL: of a frame; Qwen3-VL: of the whole video
    max_pixels: int | None = None
    cap_pixels_per_frame: bool = False  # share a budget among the frames (transformers 5.16 on)
    max_video_tokens: int | None = (
        None  # that budget: of the video (Qwen2-VL), of a frame (Qwen3-VL)
    )
    transformers: str = "5.15"  # rules of Qwen3-VL's resize: "5.15" and later, or "5.8" to 5.14
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    merge_size: int | None = None
    reader: str | None = None  # whose fps and frame count; None: upstream's first choice


@dataclass(frozen=True)
class Policy:
    name: str
    about: str
    settings: type[ProcessorSettings]
    complete: Callable[[Any], Any]  # with the policy's own defaults; refuses a contradiction
    choose: Callable[[VideoInfo, Any], FramePlan]
    models: tuple[str, ...]  # names of families
    reader: str  # the library that upstream asks first
    checks_end: bool = False  # upstream holds a frame count against a seek to the end

    def resolve(self, given: dict[str, Any]) -> Any:
        """The settings to the last, checked, with the model's defaults and the policy's. Raises: ArgumentError."""
        known = {f.name: str(f.type) for f in fields(self.settings)}
        values = {}
        for name, value in given.items():
            if name not in known:
                raise self.error(
                    f"has no setting {name!r:.40}", f"use one of {', '.join(sorted(known))}"
                )
            what = f"sample: {self.name}: setting {name}"
            values[name] = read_value(what, known[name], value, f"pass {known[name]}")
            self._check_number(name, values[name])
        settings = self.settings(**values)
        if settings.model not in self.models:
            raise self.error(
                f"model {settings.model!r:.40} is unknown", f"use one of {', '.join(self.models)}"
            )
        if settings.transformers not in ("5.8", "5.15"):
            raise self.error(
                f"transformers={settings.transformers!r:.40}",
                "'5.15' for the rules of 5.15 and later, '5.8' for those of 5.8 to 5.14",
            )
        if settings.reader is not None and settings.reader not in READERS:
            raise self.error(
                f"reader {settings.reader!r:.40} is unknown", f"use one of {', '.join(READERS)}"
            )
        return self.complete(_with_defaults(settings, self.reader))

    def plan(self, info: VideoInfo, settings: Any) -> FramePlan:
        """The plan of a video as the settings' reader has it. Raises: ArgumentError where upstream raises."""
        reading = info.readings.get(settings.reader)
        if reading is not None and reading.refusal:
            raise self.error(
                f"reader {settings.reader!r}: {reading.refusal}",
                "reader='container', on both sides",
            )
        info = info.as_read(settings.reader, checks_end=self.checks_end)
        if info.total_frames < 1:
            raise self.error("the video has no frames", "check the file")
        return self.choose(info, settings)

    def error(self, what: str, fix: str) -> ArgumentError:
        return ArgumentError(f"sample: {self.name}: {what}. Fix: {fix}")

    def _check_number(self, name: str, value: Any) -> None:
        if isinstance(value, str | bool) or value is None:
            return
        if not math.isfinite(value) or (value <= 0 and name not in _ANY_SIGN):
            raise self.error(f"setting {name} is {value}", "a positive number")
        if name in _SIZES and value > _LARGEST:
            raise self.error(f"setting {name} is {value}", f"at most {_LARGEST}")


def models_of(*layouts: str) -> tuple[str, ...]:
    """Names of the families whose videos have one of these layouts."""
    return tuple(f.name for f in FAMILIES.values() if f.video_layout in layouts)


def finish(
    policy: Policy,
    settings: ProcessorSettings,
    info: VideoInfo,
    indices: Sequence[int] | np.ndarray,
    *,
    fps: float,
    fps_assumed: bool = False,
    fps_told: bool = False,
    counted_frames: int | None = None,
    loaded_size: Size | None = None,
    resize: bool = True,
) -> FramePlan:
    """The plan of frames `indices`, once the model's processor has resized and counted them.

    Args: `fps_told`: the loader tells the processor a guess as if it were known. `loaded_size`: (width, height) that
    the loader made; the stream's if None. `resize`: does the processor?
    """
    assert settings.patch_size and settings.temporal_patch_size and settings.merge_size
    family = get_family(settings.model)
    frames = tuple(int(i) for i in indices)
    held = info.total_frames if info.held_frames is None else info.held_frames
    if frames and frames[-1] >= held:
        raise policy.error(
            f"reader {settings.reader!r} counts {info.total_frames} frames, and frame {frames[-1]} is beyond the "
            f"{held} that the stream holds",
            "reader='container', on both sides",
        )
    counted = info.total_frames if counted_frames is None else counted_frames
    source = (info.width, info.height)
    loaded = source if loaded_size is None else loaded_size
    size = processed_size(policy, settings, len(frames), loaded) if resize else loaded
    for width, height in (loaded, size):
        if width * height > Limits.max_pixels:
            raise policy.error(f"frames of {width} × {height} are no pictures", "a smaller size")
    unit = settings.patch_size * settings.merge_size
    if size[0] % unit or size[1] % unit:
        raise policy.error(
            f"frames of {size[0]} x {size[1]} are not cut into merged patches of {unit}",
            "do_resize=true, or the model's image_patch_size",
        )
    times = tuple(i / fps for i in frames)
    patches = -(-len(frames) // settings.temporal_patch_size)
    return FramePlan(
        policy=policy.name,
        settings={k: v for k, v in asdict(settings).items() if v is not None},
        indices=frames,
        timestamps=times,
        fps=fps,
        fps_assumed=fps_assumed,
        total_frames=info.total_frames,
        counted_frames=counted,
        source_size=source,
        loaded_size=loaded,
        size=size,
        grid_thw=(patches, size[1] // settings.patch_size, size[0] // settings.patch_size),
        second_per_grid_ts=_seconds(
            family, settings, len(frames), counted, fps, fps_assumed and not fps_told
        ),
        patch_timestamps=written_timestamps(family, times, settings.temporal_patch_size),
        container_timestamps=_real_times(info, frames),
    )


def processed_size(policy: Policy, settings: Any, frames: int, size: Size) -> Size:
    """(width, height) after the model's video processor. Raises: ArgumentError where upstream raises."""
    factor = settings.patch_size * settings.merge_size
    low, high = settings.min_pixels, settings.max_pixels
    if get_family(settings.model).video_layout == "single":
        if settings.cap_pixels_per_frame:
            budget = int(settings.max_video_tokens * factor * factor * 0.9)
            share = budget * settings.temporal_patch_size // frames
            high = max(min(high, share), int(low * 1.05))
        return checked(policy, qwen2_size(size, factor, low, high), size)
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * factor * factor, high // frames)
        high = max(share, int(low * 1.05)) * frames
    old = settings.transformers == "5.8"
    if old and min(size) < factor:
        raise policy.error(
            f"frames of {size[0]} x {size[1]} are smaller than a merged patch of {factor}",
            "enlarge them, or transformers='5.15'",
        )
    if not old and frames < settings.temporal_patch_size:
        raise policy.error(
            f"{frames} frame is less than a temporal patch of {settings.temporal_patch_size}, "
            "and Qwen3-VL's processor refuses it",
            "pass it as an image, or (before transformers 5.15) transformers='5.8'",
        )
    fitted = qwen3_size(size, factor, low, high, frames, settings.temporal_patch_size, round_up=old)
    return checked(policy, fitted, size)


def checked(policy: Policy, fitted: Size | None, size: Size) -> Size:
    """`fitted`, or the error of a size that no resize accepts."""
    if fitted is None or min(fitted) < 1:
        raise policy.error(
            f"frames of {size[0]} x {size[1]} can't be resized (one side is more than 200 times the other, "
            "or the pixel limits leave nothing)",
            "crop them, or set min_pixels and max_pixels",
        )
    return fitted


def written_timestamps(
    family: Family, times: Sequence[float], patch: int
) -> tuple[float, ...] | None:
    """Seconds in the prompt: of each temporal patch, halfway between its first and last frame."""
    if family.video_layout != "frames":
        return None
    padded = list(times) + [times[-1]] * (-len(times) % patch)
    return tuple((padded[k] + padded[k + patch - 1]) / 2 for k in range(0, len(padded), patch))


def _seconds(
    family: Family, settings: Any, frames: int, counted: int, fps: float, unknown: bool
) -> float | None:
    """Seconds between temporal patches: the patch over the sampled rate, in transformers' order of operations."""
    if family.tokens_per_second is None:
        return None
    sampled = fps if unknown else frames / counted * fps
    return float(settings.temporal_patch_size / sampled)


def _real_times(info: VideoInfo, frames: Sequence[int]) -> tuple[float, ...] | None:
    if info.timestamps is None:
        return None
    return tuple(float(info.timestamps[i]) for i in frames)


def _with_defaults(settings: Any, reader: str) -> Any:
    family = get_family(settings.model)
    low, high = AREAS[family.video_layout]
    defaults = {
        "reader": reader,
        "patch_size": family.patch_size,
        "temporal_patch_size": family.temporal_patch_size,
        "merge_size": family.spatial_merge_size,
        "min_pixels": low,
        "max_pixels": high,
    }
    if settings.cap_pixels_per_frame:
        defaults["max_video_tokens"] = VIDEO_TOKENS[family.video_layout]
    given = asdict(settings)
    missing = {k: v for k, v in defaults.items() if given[k] is None}
    return type(settings)(**(given | missing))
