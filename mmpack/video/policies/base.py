"""What a policy is: a row of the table in `registry.py`, with the settings that it reads.

A policy says what is taken of a video (a `Choice`). The model's processor, which comes after it, is in `processor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
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
class Settings:
    """Settings under upstream's names: of the model's video processor, then those that only some policies read.

    None: as upstream or the model's released checkpoints have it, or not read.
    """

    model: str = "qwen2_5_vl"  # a family's name
    min_pixels: int | None = None  # Qwen2-VL: of a frame; Qwen3-VL: of the whole video
    max_pixels: int | None = None
    cap_pixels_per_frame: bool = False  # share a budget among the frames (transformers 5.16 on)
    # that budget: of the video (Qwen2-VL), of a frame (Qwen3-VL)
    max_video_tokens: int | None = None
    transformers: str = "5.15"  # rules of Qwen3-VL's resize: "5.15" and later, or "5.8" and older
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    merge_size: int | None = None
    reader: str | None = None  # whose fps and frame count; None: upstream's first choice

    do_sample_frames: bool | None = None
    fps: float | None = None
    num_frames: int | None = None  # vLLM: the most, and only of its loader `opencv`
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_duration: int | None = None  # seconds; of longer videos as many frames are taken, evenly
    loader: str | None = None  # vLLM's `video_backend`; None: the model's own
    image_patch_size: int | None = None  # None: the model's; upstream's own default is 14
    frame_min_pixels: int | None = None  # qwen-vl-utils' `min_pixels` and `max_pixels`
    frame_max_pixels: int | None = None
    total_pixels: float | None = None
    resized_width: int | None = None
    resized_height: int | None = None
    video_start: float | None = None  # seconds
    video_end: float | None = None
    do_resize: bool | None = None  # the processor's; None: as the model cards have it

    def to_dict(self) -> dict[str, Any]:
        """The settings that are set, as a plan holds them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_defaults(self, **defaults: Any) -> Settings:
        """These settings, with `defaults` in place of None."""
        return Settings(**(defaults | self.to_dict()))


_OF_ALL = {f.name: f.default for f in fields(Settings)[:10]}  # up to `reader`
_KINDS = {f.name: str(f.type) for f in fields(Settings)}


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


@dataclass(frozen=True, eq=False)
class Policy:
    """One upstream's way of choosing frames: reader, rule and resize."""

    name: str
    rule: Callable[[Policy, VideoInfo, Settings], Sequence[int] | np.ndarray]
    own: Mapping[str, Any]  # settings that not all policies have, and defaults of its own
    reader: str = "torchcodec"  # the library that upstream asks first
    # settings of which one at most is given; where none is, those of `default`
    either: tuple[str, ...] = ()
    default: Mapping[str, Any] = field(default_factory=dict)
    complete: Callable[[Policy, Settings], Settings] | None = None  # with what else is its own
    # the loader's resize of so many frames; None: it has none
    load: Callable[[Policy, Size, int, Settings], Size] | None = None
    budget: bool = True  # its processors can share a budget; their resize changed in 5.15
    # vLLM: it compares a frame count with a seek to the end, and hands on what it guessed, and float32 seconds
    engine: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the families that it serves."""
        return tuple(f.name for f in FAMILIES.values() if self.name in f.video_policies)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Annotations of the settings that it reads: one with a default of its own can't be None."""
        defaults = _OF_ALL | dict(self.own)
        return {
            name: _KINDS[name] if default is None else _KINDS[name].removesuffix(" | None")
            for name, default in defaults.items()
        }

    def resolve(self, given: Mapping[str, Any]) -> Settings:
        """All settings, checked, with the model's defaults and the policy's. Raises: ArgumentError."""
        settings = Settings(**{**self.own, **self._read(given)})
        self._check_name("model", settings.model, self.models)
        fix = "'5.15' for the rules of 5.15 and later, '5.8' for those of older ones"
        self._check_name("transformers", settings.transformers, ("5.15", "5.8"), fix)
        if settings.reader is not None:
            self._check_name("reader", settings.reader, READERS)
        settings = self._with_budget(self._with_defaults(settings))
        chosen = [name for name in self.either if getattr(settings, name) is not None]
        if len(chosen) > 1:
            raise self.error(f"{' and '.join(chosen)} are both set", "set one of them")
        if not chosen:
            settings = replace(settings, **self.default)
        return settings if self.complete is None else self.complete(self, settings)

    def as_read(self, info: VideoInfo, settings: Settings) -> VideoInfo:
        """`info` as the settings' reader has it. Raises: ArgumentError for a video that it can't read."""
        assert settings.reader
        reading = info.readings.get(settings.reader)
        why = None if reading is None else reading.refusal
        if reading is not None and self.engine:
            why = why or reading.end_refusal
        if why:
            raise self.error(
                f"reader {settings.reader!r}: {why}", "set reader='container' on both sides"
            )
        info = info.as_read(settings.reader, checks_end=self.engine)
        if info.total_frames < 1:
            raise self.error("the video has no frames", "check the file")
        return info

    def choose(self, info: VideoInfo, settings: Settings) -> Choice:
        """Frames of `info`, which is as its reader has it. Raises: ArgumentError where upstream raises."""
        indices: Sequence[int] | np.ndarray = np.arange(info.total_frames)
        if settings.do_sample_frames is not False:
            indices = self.rule(self, info, settings)
        loaded = None
        if self.load is not None:
            loaded = self.load(self, (info.width, info.height), len(indices), settings)
        assumed = info.fps is None
        return Choice(
            indices,
            info.fps or ASSUMED_FPS,
            fps_assumed=assumed,
            hides_guess=assumed and self.engine,
            loaded_size=loaded,
            resize=settings.do_resize is not False,
            float32_seconds=self.engine,
        )

    def frame_range(self, total: int, fps: float, settings: Settings) -> tuple[int, int]:
        """First and last frame between `video_start` and `video_end`. Raises: ArgumentError where there are none."""
        start, end = settings.video_start, settings.video_end
        first, last = 0, total - 1
        if start is not None:
            first = math.ceil(max(0.0, min(start, total / fps)) * fps)
        if end is not None:
            last = min(math.floor(max(0.0, min(end, total / fps)) * fps), last)
        if (start is not None or end is not None) and first >= last:
            raise self.error(
                f"video_start and video_end leave frames {first} to {last} of {total} at {fps:.6g} per second",
                "choose a longer range within the clip",
            )
        return first, last

    def counted_frames(self, total: int, fps: float, settings: Settings) -> int:
        """How many of the source's `total` frames lie between its start and end. Raises: ArgumentError."""
        first, last = self.frame_range(total, fps, settings)
        return last - first + 1

    def error(self, what: str, fix: str) -> ArgumentError:
        return ArgumentError(f"sample: {self.name}: {what}. Fix: {fix}")

    def _read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        values = {}
        for name, value in given.items():
            if name not in self.kinds:
                known = ", ".join(sorted(self.kinds))
                raise self.error(f"has no setting {name!r:.40}", f"use one of {known}")
            what, kind = f"sample: {self.name}: setting {name}", self.kinds[name]
            values[name] = read_value(what, kind, value, f"pass {kind}")
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

    def _with_defaults(self, settings: Settings) -> Settings:
        family = get_family(settings.model)
        assert family.video is not None
        low, high = family.video.area
        budget = family.video.max_video_tokens if settings.cap_pixels_per_frame else None
        return settings.with_defaults(
            reader=self.reader,
            patch_size=family.patch_size,
            temporal_patch_size=family.temporal_patch_size,
            merge_size=family.spatial_merge_size,
            min_pixels=low,
            max_pixels=high,
            max_video_tokens=budget,
        )

    def _with_budget(self, settings: Settings) -> Settings:
        """Settings of a resize that has these. Raises: ArgumentError for a budget where there is none."""
        caps, tokens = settings.cap_pixels_per_frame, settings.max_video_tokens
        if (caps and tokens is None) or not (self.budget or tokens is None):
            raise self.error(
                "the model's processor has no budget for frames",
                "leave out cap_pixels_per_frame and max_video_tokens",
            )
        return settings if self.budget else replace(settings, transformers="5.15")
