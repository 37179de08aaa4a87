"""Videos as the caller has them (a file, frames, either with a plan, a recorded Medium) to Mediums with pixels.

Frames are uint8 [n, h, w, 3], patches [t·h·w, patch_dim]. Each distinct video is processed once, by content and plan.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, require
from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key, content_hash, embedding_settings, fingerprint
from mmpack.processors.cache import MediaCache
from mmpack.processors.frame_processor import resized_by_utils
from mmpack.processors.images import path_below, to_rgb
from mmpack.processors.pixels import AS_BYTES, as_bytes, patches_of_lines
from mmpack.processors.sampling import resolved
from mmpack.schema.media import Medium
from mmpack.versions import own_budgets
from mmpack.video.choose_frames import plan_of, sample
from mmpack.video.decoding import decode
from mmpack.video.files.container import content_key
from mmpack.video.frame_plan import FramePlan
from mmpack.video.hand_over import hf_kwargs
from mmpack.video.info import VideoInfo, probe
from mmpack.video.policies.base import ASSUMED_FPS, Choice
from mmpack.video.values import read_numbers, read_value

if TYPE_CHECKING:
    from mmpack.video.cache import FrameCache

SAMPLING = "sampling"  # in the video part of `processor`, and in metadata of a Medium whose plan has other settings
_UTILS = "qwen_vl_utils"  # hands on float32 frames, which it resized by rules of its own


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames as a loader hands them to a processor, uint8 [n, h, w, 3] of `plan.loaded_size`, and Medium fields."""

    frames: np.ndarray
    plan: FramePlan
    known: dict[str, Any]

    @property
    def content_hash(self) -> str:
        return content_hash("video", self.frames)

    def tensor(self) -> Any:
        """[n, 3, h, w] as the plan's loader has it: uint8, of qwen-vl-utils float32."""
        torch = require("torch", "torch", "videos")
        frames = torch.from_numpy(self.frames).permute(0, 3, 1, 2).contiguous()
        return frames.float() if self.plan.policy == _UTILS else frames

    def seconds(self, given: float | None) -> float | None:
        """`second_per_grid_ts` as a tensor gave it; in float64 where float32 only rounded the plan's."""
        mine = self.plan.second_per_grid_ts
        if given is None or mine is None or np.float32(mine) != np.float32(given):
            return given
        return mine


@dataclass(frozen=True, eq=False)
class _Found:
    """A video before it is decoded: a file or frames, and its plan."""

    key: str  # of the content: file or frames
    plan: FramePlan
    known: dict[str, Any]
    source: bytes | Path | None = None
    frames: np.ndarray | None = None
    recorded: Medium | None = None  # that says what the video was


@dataclass(frozen=True, eq=False)
class VideoReader:
    """`sampling`: of `resolved_sampling`. `threads` and `frame_cache` are those of `mp.video.decode`."""

    sampling: dict[str, Any]
    root: Path | None
    threads: int
    frame_cache: FrameCache | None
    kept_as: str = "float32"  # one of PIXELS

    def clip(self, item: Any, settings: Mapping[str, Any], where: str) -> Clip:
        """Sampled by the item's own plan, else by the policy; decoded, and resized as far as its loader does.

        `settings`: of the video processor. Raises: ArgumentError, VideoError, MissingExtraError without PyAV.
        """
        found = self._found(item, where)
        clip = self._clip(found)
        if found.recorded is not None:
            key = cache_key(clip.content_hash, clip.plan.grid_thw, embedding_settings(settings))
            _check_unchanged(found, found.recorded, clip.content_hash, key, where)
        return clip

    def medium(
        self, item: Any, processor: Any, settings: Mapping[str, Any], cache: MediaCache, where: str
    ) -> Medium:
        """`clip`, laid out by the video processor `processor`, whose `settings` decide the cache key.

        Raises: those of `clip`; LayoutError (MM101) where the processor makes another grid than the plan says.
        """
        found = self._found(item, where)
        part = embedding_settings(settings)
        layout = f"{found.key}\0{found.plan.to_json()}\0{fingerprint(part or {})}"
        seen = hashlib.sha256(layout.encode()).hexdigest()
        made = cache.get(seen)
        if made is None:
            made = _laid_out(self._clip(found), processor, part, where, self.kept_as)
            cache.put(seen, made)
        medium: Medium = copy.copy(made)
        for name, value in found.known.items():
            setattr(medium, name, value)
        if found.recorded is not None:
            content = str(medium.content_hash)
            _check_unchanged(found, found.recorded, content, medium.cache_key, where)
        return medium

    def _clip(self, found: _Found) -> Clip:
        plan = found.plan
        if found.frames is not None:
            return Clip(found.frames, plan, found.known)
        assert found.source is not None
        frames = decode(found.source, plan, threads=self.threads, cache=self.frame_cache)
        if plan.loaded_size != plan.source_size:
            torch = require("torch", "torch", "videos")
            whole = torch.from_numpy(frames).permute(0, 3, 1, 2)
            frames = resized_by_utils(whole, plan.loaded_size).permute(0, 2, 3, 1).numpy()
        return Clip(frames, plan, found.known)

    def _found(self, item: Any, where: str) -> _Found:
        video, about = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        if isinstance(video, Medium):
            video, about = video.source, video
        if not isinstance(video, (bytes, bytearray, str, Path)):
            return self._found_frames(video, about, where)
        known: dict[str, Any] = {}
        if isinstance(video, (str, Path)):
            video, known["source"] = path_below(video, self.root, where)
        if about is None:
            info = probe(video)
            values = dict(self.sampling)
            plan = sample(info, policy=values.pop("policy"), **values)
            key = info.content_key
        else:
            key = content_key(video)
            if isinstance(about, Medium):
                _check_same("file_hash", about, key, where)
            plan = self._given_plan(about, where)
        known["file_hash"] = key
        recorded = about if isinstance(about, Medium) else None
        return _Found(
            key, plan, known | self._noted(plan, recorded), source=video, recorded=recorded
        )

    def _found_frames(self, video: Any, about: Any, where: str) -> _Found:
        frames = _as_frames(video, where)
        if isinstance(about, Mapping):
            plan = self._plan_of_frames(frames, about, where)
        elif about is not None:
            plan = self._given_plan(about, where)
        else:
            raise ArgumentError(
                f'{where}: frames alone have no times. Fix: pass (frames, {{"fps": …}}), '
                "or (frames, plan)"
            )
        size = (frames.shape[2], frames.shape[1])
        if (len(frames), size) != (plan.num_frames, plan.loaded_size):
            raise ArgumentError(
                f"{where}: {len(frames)} frames of {size[0]}×{size[1]}, the plan has {plan.num_frames} of "
                f"{plan.loaded_size[0]}×{plan.loaded_size[1]}. Fix: pass the frames that this plan chose"
            )
        key, recorded = content_hash("video", frames), about if isinstance(about, Medium) else None
        noted = self._noted(plan, recorded)
        return _Found(key, plan, noted, frames=frames, recorded=recorded)

    def _noted(self, plan: FramePlan, recorded: Medium | None) -> dict[str, Any]:
        """Medium's metadata: the plan's settings where they are not the processor's, which every sample records.

        A recorded Medium's own name and metadata stay.
        """
        settings = plan.processor_settings()
        noted = {} if settings == self.sampling else {SAMPLING: settings}
        if recorded is None:
            return {"metadata": noted}
        return {"media_id": recorded.media_id, "metadata": recorded.metadata | noted}

    def _given_plan(self, about: Any, where: str) -> FramePlan:
        if isinstance(about, Medium):
            about = FramePlan.from_medium(about, about.metadata.get(SAMPLING, self.sampling))
        if not isinstance(about, FramePlan):
            raise ArgumentError(
                f"{where}: the video comes with {type(about).__name__}. "
                "Fix: pass (file, mp.video.sample(…)), a recorded "
                'Medium, or (frames, {"fps": …})'
            )
        model = about.settings.get("model")
        if model != self.sampling["model"]:
            raise ArgumentError(
                f"{where}: the plan is for {model!r:.40}, but this processor samples as {self.sampling['model']}. "
                f"Fix: pass mp.video.sample(…, model={self.sampling['model']!r})"
            )
        return about

    def _plan_of_frames(
        self, frames: np.ndarray, given: Mapping[str, Any], where: str
    ) -> FramePlan:
        """Frames that were sampled elsewhere, with the names of transformers' and vLLM's metadata.

        `fps` of None: nobody knows it, and transformers' guess counts. `total_num_frames` is the whole file's; of a cut
        by `video_start` and `video_end` (of the policy qwen_vl_utils) the seconds count what the cut leaves. `width`
        and `height` are the file's, before its loader resized the frames. Raises: ArgumentError where they contradict.
        """
        place = f"{where}: the frames' description"
        about = _described(given, place)
        fps, numbers = about.fps or ASSUMED_FPS, about.frames_indices
        indices = np.arange(len(frames)) if numbers is None else numbers
        total = about.total_num_frames
        if total is None:
            by_time = round(about.duration * fps) if about.duration and numbers is not None else 0
            total = max(by_time, int(indices.max(initial=-1)) + 1)
        wrong = _contradiction(about, frames, indices, total, fps)
        if wrong is not None:
            raise ArgumentError(f"{place}{wrong[0]}. Fix: {wrong[1]}")
        loaded = (frames.shape[2], frames.shape[1])
        width, height = (about.width, about.height) if about.width and about.height else loaded
        info = VideoInfo(width, height, 0, "", about.fps, total, None, False, total / fps, "")
        policy, settings = resolved(self.sampling)
        resize = settings.do_resize is not False
        assumed = about.fps is None
        choice = Choice(indices, fps, fps_assumed=assumed, loaded_size=loaded, resize=resize)
        return plan_of(policy, settings, info, choice)


@dataclass(frozen=True)
class _Described:
    """What is known of frames that were sampled elsewhere."""

    fps: float | None
    frames_indices: np.ndarray | None = None  # int64 [n], of the file
    total_num_frames: int | None = None
    duration: float | None = None
    width: int | None = None
    height: int | None = None
    do_sample_frames: bool | None = None
    video_backend: Any = None


_KINDS = {f.name: str(f.type) for f in fields(_Described)}
_FIX = {
    "fps": "pass a rate above 0, or None if it is not known",
    "frames_indices": "pass each frame's number in the file, ascending",
    "total_num_frames": "pass the number of frames in the whole file, or leave it out",
    "duration": "pass the seconds of the whole file, with its fps and total_num_frames, or leave it out",
    "do_sample_frames": "pass the frames to keep and do_sample_frames=False, or pass the file",
    "size": "pass the file's width and height, or neither",
}
_SLACK = 0.01  # of a duration that is rounded, or of a file whose sound is a little longer


def _described(given: Mapping[str, Any], place: str) -> _Described:
    """The description's values, each of its kind; numbers are above 0. Raises: ArgumentError naming one that isn't."""
    given = {name: given[name] for name in given}  # transformers' own has no working `get`
    odd = [name for name in given if name not in _KINDS]
    if "fps" not in given or odd:
        what = f"{odd[0]!r:.40} is unknown" if odd else "has no fps"
        raise ArgumentError(
            f"{place}: {what}. Fix: pass fps (of the whole video), and if they were sampled frames_indices and "
            "total_num_frames"
        )
    read: dict[str, Any] = {}
    for name, value in given.items():
        what, fix = f"{place}, {name}", _FIX.get(name, _FIX["size"])
        if name == "frames_indices":
            read[name] = None if value is None else read_numbers(what, value, fix)
        elif name != "video_backend":
            read[name] = number = read_value(what, _KINDS[name], value, fix)
            if not isinstance(number, bool | None) and not 0 < number < math.inf:
                raise ArgumentError(f"{what} is {number:g}. Fix: {fix}")
    return _Described(**read)


def _contradiction(
    about: _Described, frames: np.ndarray, indices: np.ndarray, total: int, fps: float
) -> tuple[str, str] | None:
    """What can't be true of the frames, and the fix; None: nothing."""
    count, seconds = len(frames), about.duration
    if len(indices) != count:
        what = f", frames_indices has {len(indices)} numbers for {count} frames"
        return what, _FIX["frames_indices"]
    for k, (low, high) in enumerate(pairwise([0, *indices.tolist()])):
        if high < low:
            return f", frames_indices has {high} after {low}", _FIX["frames_indices"]
        # as of a policy that repeats one
        if k and high == low and not np.array_equal(frames[k - 1], frames[k]):
            what = f", frames_indices has {high} twice, but frames {k - 1} and {k} differ"
            return what, "pass each frame's number in the file"
    if about.frames_indices is None and about.total_num_frames not in (None, count):
        return (
            f" has no frames_indices, but there are {count} frames of {total} (total_num_frames)",
            "pass frames_indices, each frame's number in the file",
        )
    if seconds is not None and abs(seconds - total / fps) > _SLACK * seconds + 1 / fps:
        return (
            f", duration is {seconds:g} s, but {total} frames at {fps:g} per second take {total / fps:g} s",
            _FIX["duration"],
        )
    if indices[-1] >= total:
        return (
            f": frames_indices go up to {indices[-1]}, total_num_frames is {total} (qwen-vl-utils gives the number "
            "after a cut)",
            "pass the file's total_num_frames, with the cut's video_start and video_end as video_settings of "
            "video_policy='qwen_vl_utils'; or (frames, plan)",
        )
    if about.do_sample_frames:
        what = ", do_sample_frames is true, but frames handed in are not sampled again"
        return what, _FIX["do_sample_frames"]
    if (about.width is None) != (about.height is None):
        return f", width and height are {about.width} and {about.height}", _FIX["size"]
    return None


def _laid_out(
    clip: Clip, processor: Any, part: dict[str, Any] | None, where: str, kept_as: str
) -> Medium:
    plan = clip.plan
    options = own_budgets(processor) | hf_kwargs(plan) | (AS_BYTES if kept_as == "uint8" else {})
    try:
        out = processor(videos=[clip.tensor()], return_tensors="pt", **options)
    except ValueError as error:  # a shape that it can't resize
        why = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"{where}: the video processor refuses {plan.num_frames} frames of {plan.loaded_size[0]}×"
            f"{plan.loaded_size[1]} ({why}). Fix: use another video"
        ) from None
    grid, made = _patches(out, get_family(plan.settings["model"]))
    if grid != plan.grid_thw:
        raise LayoutError(
            f"{where}: the video processor makes a grid of {list(grid)}, but the plan expects {list(plan.grid_thw)}. "
            "Fix: make plan and processor with the same family and the same transformers",
            "MM101",
        )
    content = clip.content_hash
    medium = Medium(
        media_id=f"video:{content[:16]}",
        modality="video",
        cache_key=cache_key(content, plan.grid_thw, part),
        content_hash=content,
        **plan.medium_fields(),
    )
    medium.pixel_values = as_bytes(made, where) if kept_as == "uint8" else made
    return medium


def _patches(out: Any, family: Family) -> tuple[tuple[int, ...], np.ndarray]:
    """Grid and patches of the one video that a processor of transformers laid out."""
    made = np.asarray(out["pixel_values_videos"])
    if family.pixel_layout == "padded":
        done = patches_of_lines(made, np.asarray(out["video_position_ids"]), family)
        return done.grid_thw, done.pixel_values
    return tuple(int(n) for n in out["video_grid_thw"][0]), made


def _as_frames(video: Any, where: str) -> np.ndarray:
    """uint8 [n, h, w, 3] of an array, a tensor or a list of pictures. Raises: ArgumentError."""
    if isinstance(video, (list, tuple)):
        pictures = [to_rgb(p, where) if hasattr(p, "convert") else np.asarray(p) for p in video]
        shapes = {p.shape for p in pictures}
        if len(shapes) != 1:
            unlike = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            what = f"the frames have shapes {unlike}" if shapes else "there are no frames"
            raise ArgumentError(f"{where}: {what}. Fix: pass RGB frames of one size, or the file")
        frames = np.stack(pictures)
    else:
        frames = np.asarray(video)
    if frames.ndim == 4 and frames.shape[3] != 3 and frames.shape[1] == 3:
        frames = np.moveaxis(frames, 1, 3)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise ArgumentError(
            f"{where}: the frames have dtype {frames.dtype} and shape {list(frames.shape)}, expected uint8 [n, "
            "h, w, 3]. "
            "Fix: pass RGB frames of one size, or the file"
        )
    return np.ascontiguousarray(frames)


def _check_unchanged(found: _Found, recorded: Medium, content: str, key: str, where: str) -> None:
    """Are the frames those that were recorded? `content` and `key` are of what is there now. Raises: ArgumentError."""
    if found.frames is not None or recorded.file_hash is None:
        _check_same("content_hash", recorded, content, where)
    if found.frames is not None:
        return
    # without a content hash (masked or cut without the frames at hand) only the key decides
    old, new = recorded.content_hash, content
    if old is None:
        old, new = recorded.cache_key, key
    if old != new:
        raise ArgumentError(
            f"{where}: {recorded.media_id!r:.80} was changed after decoding (frames masked or dropped, or "
            "another processor), but its file holds the original frames. "
            "Fix: keep its pixel_values, or process the file and "
            "apply mask_frames or drop_frames again"
        )


def _check_same(name: str, recorded: Medium, new: str, where: str) -> None:
    old = getattr(recorded, name)
    if old is not None and old != new:
        raise ArgumentError(
            f"{where}: this is not the video that was recorded ({name} {new[:16]}…, {recorded.media_id!r:.60} has "
            f"{str(old)[:16]}…). Fix: pass the file that the rollout saw"
        )
