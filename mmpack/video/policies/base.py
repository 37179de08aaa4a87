"""What a policy is: its name, its settings with their defaults, and the function that chooses frames.

A policy says what is taken of a video (a `Choice`). The model's processor, which comes after it, is in `processor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import FAMILIES, get_family
from mmpack.video.files.readers import READERS
from mmpack.video.info import VideoInfo
from mmpack.video.policies.resize import Size
from mmpack.video.values import read_value

ASSUMED_FPS = 24.0  # transformers' guess where a container has no frame rate
_ANY_SIGN = ("video_start", "video_end")
_SIZES = ("patch_size", "image_patch_size", "temporal_patch_size", "merge_size")
_LARGEST_SIZE = 1024


@dataclass(frozen=True)
class ProcessorSettings:
    """Settings of the model's video processor. None: as its released checkpoints have it."""

    model: str = "qwen2_5_vl"  # a family's name
    min_pixels: int | None = None  # Qwen2-VL: of a frame; Qwen3-VL: of the whole video
    max_pixels: int | None = None
    cap_pixels_per_frame: bool = False  # share a budget among the frames (transformers 5.16 on)
    # that budget: of the video (Qwen2-VL), of a frame (Qwen3-VL)
    max_video_tokens: int | None = None
    transformers: str = "5.15"  # rules of Qwen3-VL's resize: "5.15" and later, or "5.8" to 5.14
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    merge_size: int | None = None
    reader: str | None = None  # whose fps and frame count; None: upstream's first choice

    def to_dict(self) -> dict[str, Any]:
        """The settings that are set, as a plan holds them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, eq=False)
class Choice:
    """What a policy takes of a video, before the model's processor resizes it."""

    indices: Sequence[int] | np.ndarray  # ascending
    fps: float  # of the source
    fps_assumed: bool = False  # `fps` is a guess, since the container has none
    # the loader hands the guess to the processor as if it were known
    hides_guess: bool = False
    loaded_size: Size | None = None  # made by the loader; None: the stream's
    resize: bool = True  # does the processor resize?
    float32_seconds: bool = False  # second_per_grid_ts travels to the model as a float32 tensor


@dataclass(frozen=True)
class Policy:
    """One upstream's way of choosing frames."""

    name: str
    settings: type[ProcessorSettings]
    complete: Callable[[Any], Any]  # with the policy's own defaults; refuses a contradiction
    choose: Callable[[VideoInfo, Any], Choice]
    reader: str = "torchcodec"  # the library that upstream asks first
    checks_end: bool = False  # upstream compares a frame count with a seek to the end
    # first and last frame of (total, fps, settings), where settings can cut the video; None: all
    frame_range: Callable[[int, float, Any], tuple[int, int]] | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the families that it serves."""
        return tuple(f.name for f in FAMILIES.values() if self.name in f.video_policies)

    def resolve(self, given: dict[str, Any]) -> Any:
        """All settings, checked, with the model's defaults and the policy's. Raises: ArgumentError."""
        settings = self.settings(**self._read(given))
        self._check_name("model", settings.model, self.models)
        fix = "'5.15' for the rules of 5.15 and later, '5.8' for those of 5.8 to 5.14"
        self._check_name("transformers", settings.transformers, ("5.15", "5.8"), fix)
        if settings.reader is not None:
            self._check_name("reader", settings.reader, READERS)
        return self.complete(_with_defaults(settings, self.reader))

    def as_read(self, info: VideoInfo, settings: ProcessorSettings) -> VideoInfo:
        """`info` as the settings' reader has it. Raises: ArgumentError for a video that it can't read."""
        assert settings.reader
        reading = info.readings.get(settings.reader)
        why = None if reading is None else reading.refusal
        if reading is not None and self.checks_end:
            why = why or reading.end_refusal
        if why:
            raise self.error(
                f"reader {settings.reader!r}: {why}",
                "set reader='container' on both sides",
            )
        info = info.as_read(settings.reader, checks_end=self.checks_end)
        if info.total_frames < 1:
            raise self.error("the video has no frames", "check the file")
        return info

    def counted_frames(self, total: int, fps: float, settings: Any) -> int:
        """How many of the source's `total` frames lie between its start and end. Raises: ArgumentError."""
        if self.frame_range is None:
            return total
        first, last = self.frame_range(total, fps, settings)
        return last - first + 1

    def refuse_both(self, settings: Any, first: str, second: str) -> None:
        """Raises: ArgumentError where both settings are given."""
        if getattr(settings, first) is not None and getattr(settings, second) is not None:
            raise self.error(f"{first} and {second} are both set", "set one of them")

    def error(self, what: str, fix: str) -> ArgumentError:
        return ArgumentError(f"sample: {self.name}: {what}. Fix: {fix}")

    def _read(self, given: dict[str, Any]) -> dict[str, Any]:
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
        return values

    def _check_name(self, name: str, value: str, known: Collection[str], fix: str = "") -> None:
        if value not in known:
            raise self.error(
                f"{name} {value!r:.40} is unknown", fix or f"use one of {', '.join(known)}"
            )

    def _check_number(self, name: str, value: Any) -> None:
        if isinstance(value, str | bool) or value is None:
            return
        if not math.isfinite(value) or (value <= 0 and name not in _ANY_SIGN):
            raise self.error(f"setting {name} is {value}", "pass a positive number")
        if name in _SIZES and value > _LARGEST_SIZE:
            raise self.error(f"setting {name} is {value}", f"pass at most {_LARGEST_SIZE}")


def _with_defaults(settings: Any, reader: str) -> Any:
    family = get_family(settings.model)
    assert family.video is not None
    low, high = family.video.area
    defaults = {
        "reader": reader,
        "patch_size": family.patch_size,
        "temporal_patch_size": family.temporal_patch_size,
        "merge_size": family.spatial_merge_size,
        "min_pixels": low,
        "max_pixels": high,
    }
    if settings.cap_pixels_per_frame:
        defaults["max_video_tokens"] = family.video.max_video_tokens
    return type(settings)(**(defaults | settings.to_dict()))
