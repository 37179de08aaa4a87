"""The plan of one video: which frames, at which times, in which size. Made once, recorded with the sample.

Indices count frames of the stream in presentation order from 0; times are seconds; sizes are (width, height) in pixels,
upright; grids are (t, h, w) in patches before merging.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.schema.media import Medium
from mmpack.video.policies.base import ASSUMED_FPS
from mmpack.video.policies.processor import written_timestamps
from mmpack.video.policies.registry import policy_of
from mmpack.video.values import read_value

_FIX = "read what to_json wrote"
_FIX_MEDIUM = "record plan.medium_fields()"
# reader of plans that name none: they were made before there were others
_READER_BEFORE_READERS = "container"
# fields of a plan by their names in a Medium
_RECORDED = {
    "indices": "frame_indices",
    "timestamps": "frame_timestamps",
    "total_frames": "total_frames",
    "loaded_size": "size",
    "source_size": "decoded_size",
    "fps": "fps",
    "grid_thw": "grid_thw",
    "second_per_grid_ts": "second_per_grid_ts",
}
_MAY_LACK = ("fps", "second_per_grid_ts")


@dataclass(frozen=True)
class FramePlan:
    """What a policy chose. Temporal padding (the family repeats the last frame) is in `grid_thw`, not in `indices`.

    Example: a plan goes into JSON and back.
        >>> from mmpack.video import FramePlan, sample
        >>> from mmpack.video.info import VideoInfo
        >>> clip = VideoInfo(width=640, height=360, rotation=0, codec="h264", fps=10.0, total_frames=20,
        ...     timestamps=None, variable=False, duration=2.0, content_key="0" * 64)
        >>> plan = sample(clip, policy="transformers_qwen2_vl", num_frames=4)
        >>> plan.indices, plan.timestamps, plan.second_per_grid_ts
        ((0, 5, 10, 15), (0.0, 0.5, 1.0, 1.5), 1.0)
        >>> FramePlan.from_json(plan.to_json()) == plan
        True
    """

    policy: str
    settings: dict[str, Any]  # every one of the policy, resolved
    indices: tuple[int, ...]  # ascending; they repeat where the policy itself takes a frame twice
    timestamps: tuple[float, ...]  # of each index, as the policy counts: index / fps
    fps: float  # of the source, as the policy took it
    fps_assumed: bool  # the container has none, and `fps` is the policy's guess
    total_frames: int  # of the source
    counted_frames: int  # of them, those between the policy's start and end
    source_size: tuple[int, int]  # of the stream
    loaded_size: tuple[int, int]  # as a loader hands the frames to the processor
    size: tuple[int, int]  # after the processor's resize: what the patches are cut from
    grid_thw: tuple[int, int, int]
    second_per_grid_ts: float | None = None  # None where the family has none
    # [t], as they are written in the prompt; None: not written
    patch_timestamps: tuple[float, ...] | None = None
    # real times of `indices`, if the container has them
    container_timestamps: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", dict(self.settings))  # its own

    def __hash__(self) -> int:
        return hash((self.policy, self.indices, self.timestamps, self.size, self.grid_thw))

    @property
    def num_frames(self) -> int:
        """Frames to decode, without temporal padding."""
        return len(self.indices)

    @property
    def reader(self) -> str:
        """The library whose fps and frame count were taken."""
        return str(self.settings["reader"])

    @property
    def num_tokens(self) -> int:
        """Vision tokens after merging."""
        t, h, w = self.grid_thw
        merge: int = self.settings["merge_size"]
        return t * (h // merge) * (w // merge)

    @property
    def resizes(self) -> tuple[tuple[int, int], ...]:
        """Sizes in the order in which frames are resized to them: by the loader, by the processor, by both, or none."""
        steps = (self.source_size, self.loaded_size, self.size)
        return tuple(new for old, new in pairwise(steps) if new != old)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; lists for tuples."""
        return {name: _listed(value) for name, value in asdict(self).items()}

    def to_json(self) -> str:
        """JSON text: equal plans give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FramePlan:
        """The plan that `to_dict` wrote. Raises: ArgumentError naming the field that is missing, unknown or wrong."""
        if not isinstance(values, dict):
            raise ArgumentError(f"FramePlan: not a JSON object. Fix: {_FIX}")
        known = {f.name: f for f in fields(cls)}
        odd = sorted(set(values) ^ set(known), key=str)
        if odd:
            what = "is unknown" if odd[0] in values else "is missing"
            raise ArgumentError(f"FramePlan: {odd[0]!r:.60} {what}. Fix: {_FIX}")
        read = {
            name: read_value(f"FramePlan: {name}", str(field.type), values[name], _FIX)
            for name, field in known.items()
        }
        read["settings"] = {"reader": _READER_BEFORE_READERS, **read["settings"]}
        plan = cls(**read)
        _check(plan, {}, "", _FIX)
        return plan

    @classmethod
    def from_json(cls, text: str) -> FramePlan:
        """The plan that `to_json` wrote. Raises: ArgumentError."""
        try:
            values = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"FramePlan: not JSON ({error}). Fix: {_FIX}") from None
        return cls.from_dict(values)

    def medium_fields(self) -> dict[str, Any]:
        """Fields of `Medium` that record this plan. `fps` is None where it was assumed: the times show which."""
        return {
            "grid_thw": self.grid_thw,
            "num_tokens": self.num_tokens,
            "size": self.loaded_size,
            "decoded_size": self.source_size,
            "fps": None if self.fps_assumed else self.fps,
            "frame_indices": np.asarray(self.indices, dtype=np.int64),
            "frame_timestamps": self.timestamps,
            "second_per_grid_ts": self.second_per_grid_ts,
            "total_frames": self.total_frames,
        }

    def processor_settings(self) -> dict[str, Any]:
        """What belongs into `processor["video"]["sampling"]`: the policy's name and settings."""
        return {"policy": self.policy, **self.settings}

    @classmethod
    def from_medium(cls, medium: Medium, sampling: Mapping[str, Any]) -> FramePlan:
        """The plan out of a recorded video and its `processor["video"]["sampling"]`; nothing is guessed.

        Real times of the container are not recorded with a sample. Raises: ArgumentError.
        """
        of = f" of {medium.media_id!r:.60}"
        if not isinstance(sampling, Mapping):
            raise ArgumentError(
                f"FramePlan: sampling{of} is {type(sampling).__name__}. Fix: record plan.processor_settings()"
            )
        read = _of_medium(medium, of)
        values = {"reader": _READER_BEFORE_READERS, **sampling}
        policy = policy_of(values.pop("policy", None))
        settings = policy.resolve(values)
        assert settings.patch_size and settings.temporal_patch_size
        _, height, width = read["grid_thw"]
        plan = cls(
            **read | {"fps": ASSUMED_FPS if read["fps"] is None else read["fps"]},
            policy=policy.name,
            settings=settings.to_dict(),
            fps_assumed=read["fps"] is None,
            counted_frames=read["total_frames"],
            size=(width * settings.patch_size, height * settings.patch_size),
        )
        _check(plan, _RECORDED | {"size": "grid_thw"}, of, _FIX_MEDIUM)
        family, times = get_family(settings.model), plan.timestamps
        return replace(
            plan,
            counted_frames=policy.counted_frames(plan.total_frames, plan.fps, settings),
            patch_timestamps=written_timestamps(family, times, settings.temporal_patch_size),
        )


def _of_medium(medium: Medium, of: str) -> dict[str, Any]:
    """What a Medium records of a plan, by the plan's names; its `fps` is None where it was assumed."""
    kinds = {f.name: str(f.type) for f in fields(FramePlan)} | {"fps": "float | None"}
    out = {}
    for mine, name in _RECORDED.items():
        value = getattr(medium, name)
        if value is None and mine not in _MAY_LACK:
            raise ArgumentError(f"FramePlan: {of[4:]} has no {name}. Fix: {_FIX_MEDIUM}")
        value = value.tolist() if isinstance(value, np.ndarray) else value
        out[mine] = read_value(f"FramePlan: {name}{of}", kinds[mine], value, _FIX_MEDIUM)
    return out


def _check(plan: FramePlan, names: Mapping[str, str], of: str, fix: str) -> None:
    """Refuse a plan that contradicts itself. Raises: ArgumentError naming the field, by `names` where they have it."""
    settings = policy_of(plan.policy).resolve(plan.settings)
    assert settings.patch_size and settings.merge_size and settings.temporal_patch_size
    patch, unit = settings.patch_size, settings.patch_size * settings.merge_size
    frames, (width, height) = list(plan.indices), plan.size
    patches = -(-len(frames) // settings.temporal_patch_size)
    right = {
        "settings": plan.settings == settings.to_dict(),
        "total_frames": plan.total_frames > 0,
        "counted_frames": 0 < plan.counted_frames <= plan.total_frames,
        "indices": frames == sorted(frames)
        and frames != []
        and 0 <= frames[0] <= frames[-1] < plan.total_frames,
        "source_size": min(plan.source_size) > 0,
        "loaded_size": min(plan.loaded_size) > 0,
        "size": min(plan.size) > 0 and width % unit == height % unit == 0,
        "grid_thw": plan.grid_thw == (patches, height // patch, width // patch),
        "fps": _is_positive(plan.fps),
        "second_per_grid_ts": plan.second_per_grid_ts is None
        or _is_positive(plan.second_per_grid_ts),
        "timestamps": _are_times(plan.timestamps, len(frames)) and _count_so(plan),
        "container_timestamps": _are_times(plan.container_timestamps, len(frames)),
        "patch_timestamps": _are_times(plan.patch_timestamps, patches),
    }
    wrong = next((name for name, holds in right.items() if not holds), None)
    if wrong is not None:
        value = reprlib.repr(getattr(plan, wrong))
        raise ArgumentError(
            f"FramePlan: {names.get(wrong, wrong)}{of} is {value:.80}, impossible by itself or with the other fields. "
            f"Fix: {fix}"
        )


def _count_so(plan: FramePlan) -> bool:
    """Is each time its index over `fps`, up to rounding? All policies count so."""
    pairs = zip(plan.indices, plan.timestamps, strict=True)
    return all(abs(t * plan.fps - i) <= 1e-3 * (i + plan.fps) for i, t in pairs)


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _are_times(values: tuple[float, ...] | None, count: int) -> bool:
    return values is None or (len(values) == count and all(map(math.isfinite, values)))


def _listed(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_listed(v) for v in value]
    if isinstance(value, dict):
        return {k: _listed(v) for k, v in value.items()}
    return value
