"""A video's medium without some temporal patches, or with black ones: pixels, times, content hash and cache key."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import Family
from mmpack.layout.fingerprint import cache_key, content_hash
from mmpack.layout.seconds import seconds_in
from mmpack.schema.media import Medium
from mmpack.video.patches import CHANNELS
from mmpack.video.pixel_settings import normalization, normalized_bytes


def shorter(
    medium: Medium,
    kept: np.ndarray,
    family: Family,
    frames: np.ndarray | None,
    settings: dict[str, Any] | None,
    second_per_grid_ts: float | None,
) -> Medium:
    """The medium of the temporal patches `kept`; pixels are a view where those are consecutive."""
    t, h, w = medium.grid_thw
    out = dataclasses.replace(medium, grid_thw=(len(kept), h, w), pixel_values=None)
    out.num_tokens = family.vision_tokens(out.grid_thw)
    if medium.pixel_values is not None:
        patches = medium.pixel_values.reshape(t, h * w, family.patch_dim)
        first, stop = int(kept[0]), int(kept[-1]) + 1
        left_rows = patches[first:stop] if stop - first == len(kept) else patches[kept]
        out.pixel_values = left_rows.reshape(len(kept) * h * w, family.patch_dim)
    known = (medium.frame_indices, medium.frame_timestamps, frames)
    count = next((len(values) for values in known if values is not None), 0)
    left = _frames_of(kept, count, family)
    if medium.frame_indices is not None:
        out.frame_indices = medium.frame_indices[left]
    if medium.frame_timestamps is not None:
        out.frame_timestamps = tuple(medium.frame_timestamps[i] for i in left)
    if second_per_grid_ts is not None:
        out.second_per_grid_ts = float(second_per_grid_ts)
    elif medium.second_per_grid_ts is not None and len(left) < count:
        out.second_per_grid_ts = _spread(medium, count, len(left), family)
    if len(kept) < t:
        part = None if frames is None else _checked(frames, medium, family)[left]
        _rekey(out, f"kept\0{kept.tolist()}", part, settings)
    return out


def blackened(
    medium: Medium,
    gone: np.ndarray,
    family: Family,
    frames: np.ndarray | None,
    settings: dict[str, Any] | None,
) -> Medium:
    """The medium with the temporal patches `gone` black."""
    out = dataclasses.replace(medium)
    if medium.pixel_values is not None:
        t, h, w = medium.grid_thw
        pixels = copy.deepcopy(medium.pixel_values)
        last = family.pixel_layout == "padded"  # channels, in such a patch
        rows = pixels.reshape(t, h * w, *((-1, CHANNELS) if last else (CHANNELS, -1)))
        # black is 0 until it is normalised
        as_bytes = str(pixels.dtype) in ("uint8", "torch.uint8")
        black = [0] * CHANNELS if as_bytes else _black((settings or {}).get("video")).tolist()
        for channel, value in enumerate(black):
            for k in gone:
                (rows[int(k), ..., channel] if last else rows[int(k), :, channel])[...] = value
        out.pixel_values = rows.reshape(t * h * w, family.patch_dim)
    if frames is not None:
        frames = _checked(frames, medium, family).copy()
        frames[_frames_of(gone, len(frames), family)] = 0
    _rekey(out, f"black\0{gone.tolist()}", frames, settings)
    return out


def _spread(medium: Medium, count: int, left: int, family: Family) -> float:
    """Seconds of a temporal patch, where the video's are spread over `left` frames in place of `count`."""
    assert medium.second_per_grid_ts is not None  # checked by the caller
    if medium.fps and medium.total_frames:  # in the order in which transformers computes it
        whole, part = (
            family.temporal_patch_size / (n / medium.total_frames * medium.fps)
            for n in (count, left)
        )
        if np.isclose(whole, medium.second_per_grid_ts, rtol=1e-6):
            return part
        for dtype in ("bfloat16", "float16"):  # as an engine cast it
            if seconds_in(whole, dtype) == medium.second_per_grid_ts:
                return seconds_in(part, dtype)
    return medium.second_per_grid_ts * count / left


def _rekey(
    medium: Medium, what: str, frames: np.ndarray | None, settings: dict[str, Any] | None
) -> None:
    """Content hash and cache key of changed content: by the frames, or made of the old key."""
    if frames is not None:
        medium.content_hash = content_hash("video", frames)
        part = (settings or {}).get("video")
        medium.cache_key = cache_key(medium.content_hash, medium.grid_thw, part)
    else:
        medium.content_hash = None
        text = f"mmpack.media.1\0{medium.cache_key}\0{what}"
        medium.cache_key = hashlib.sha256(text.encode()).hexdigest()


def _frames_of(patches: np.ndarray, count: int, family: Family) -> np.ndarray:
    """Numbers of the frames in these temporal patches, of `count` frames in all."""
    size = family.temporal_patch_size
    slots = (patches[:, None] * size + np.arange(size)).reshape(-1)
    return slots[slots < count]


def _checked(frames: np.ndarray, medium: Medium, family: Family) -> np.ndarray:
    frames = np.asarray(frames)
    fits = frames.ndim == 4 and frames.shape[3] == CHANNELS and frames.dtype == np.uint8
    if not fits or -(-len(frames) // family.temporal_patch_size) != medium.grid_thw[0]:
        raise ArgumentError(
            f"frames of shape {list(frames.shape)} and dtype {frames.dtype} are not those of {medium.media_id!r:.60}, "
            f"grid {list(medium.grid_thw)}. Fix: pass uint8 [n, h, w, 3], all frames that the processor got"
        )
    return frames


def _black(settings: dict[str, Any] | None) -> np.ndarray:
    """float32 [3]: what normalising makes of 0 in each channel, step by step as in `pack_video`."""
    how = normalization(settings)
    if how["mean"] is None:
        return np.zeros(CHANNELS, np.float32)
    rescale = how["rescale_factor"] or 1.0
    return normalized_bytes("torchvision", rescale, how["mean"], how["std"])[:, 0]
