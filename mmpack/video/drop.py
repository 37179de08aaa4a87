"""Temporal patches of a sample's video cut out, or made black: tokens, spans, positions, times and keys follow.

The sample is then what a processor makes of the shorter (or blackened) clip, in the pixel size of the whole one.
Nothing is changed in place.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key, content_hash
from mmpack.layout.mrope import sample_positions
from mmpack.layout.seconds import frame_seconds, frame_text, seconds_in
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ModalitySpan
from mmpack.video.patches import CHANNELS
from mmpack.video.pixel_settings import normalization, normalized_bytes
from mmpack.video.values import read_numbers, read_value


def drop_frames(
    sample: Sample,
    media_index: int,
    temporal_patches: Sequence[int],
    *,
    frames: np.ndarray | None = None,
    second_per_grid_ts: float | None = None,
) -> Sample:
    """The sample without these temporal patches of a video, at each place of the video in it.

    Args:
        media_index: the video's, in sample.media.
        temporal_patches: numbers of those to drop, from 0. At least one must stay.
        frames: uint8 [n, h, w, 3] that were handed to the processor, all of them. With them the medium gets the content
            hash of the shorter clip and the cache key of that content in this grid; without them a key of its own, made
            of the old one and of what is kept, and no content hash.
        second_per_grid_ts: of the shorter clip; by default the video's seconds spread over the frames that are left, as
            processors count (temporal_patch_size · total_frames / (frames · fps)).

    Rows of pixels, placeholders, and in families with timestamps in the text their text and markers are cut out. Spans,
    scores of spans and `prefix_cached_tokens` count the tokens that are left; positions are counted again by the rule
    that the recorded ones follow. Loss tokens and their logprobs stay, and so do `fps` and `total_frames`.

    Frames keep the size that they have in the whole clip. Where a processor's limit depends on the number of frames
    (Qwen3-VL's, `cap_pixels_per_frame`), it may give the shorter clip larger frames: another grid and cache key.

    Raises: ArgumentError for a medium that is not a video, patches that it does not have, a loss span over dropped
    tokens, or positions that follow no rule of the family.
    """
    family, medium, gone = _asked(sample, media_index, temporal_patches, "drop_frames")
    kept = np.setdiff1d(np.arange(medium.grid_thw[0]), gone)
    if not len(kept):
        raise ArgumentError(
            f"drop_frames: nothing of {medium.media_id!r:.60} would be left. "
            "Fix: keep a temporal patch, or leave out the sample"
        )
    stays = np.ones(len(sample), dtype=bool)
    for start, stop in spans_to_cut(sample, media_index, gone, family):
        stays[start:stop] = False
    _refuse_lost_loss(sample, stays)
    left = shorter(medium, kept, family, frames, sample.processor, second_per_grid_ts)
    rule = _rule_of(sample, family)
    out = without_tokens(sample, stays, media_index, gone)
    out.media = [left if i == media_index else m for i, m in enumerate(sample.media)]
    if rule is not None:
        out.position_ids = sample_positions(out, rule)[0]
    return out


def mask_frames(
    sample: Sample,
    media_index: int,
    temporal_patches: Sequence[int],
    *,
    frames: np.ndarray | None = None,
) -> Sample:
    """The sample with these temporal patches (from 0) of a video black; layout, positions and loss don't change.

    Pixel rows (float32 or uint8 [patches, patch_dim]) become what the processor makes of black frames
    (`processor["video"]` says how it normalises), so an engine that gets the clip with black frames sees the same.
    That hides what the frames show, not that they exist: attention still reaches their tokens. The cache key changes,
    and with `frames` (uint8 [n, h, w, 3], as in `drop_frames`) the content hash becomes the blackened clip's.
    Raises: ArgumentError, as `drop_frames`.
    """
    family, medium, gone = _asked(sample, media_index, temporal_patches, "mask_frames")
    black = blackened(medium, gone, family, frames, sample.processor)
    out = dataclasses.replace(sample)
    out.media = [black if i == media_index else m for i, m in enumerate(sample.media)]
    return out


def _asked(
    sample: Sample, media_index: int, temporal_patches: Sequence[int], what: str
) -> tuple[Family, Medium, np.ndarray]:
    """The family, the medium and the patches, ascending, each once."""
    fix = "pass an index into sample.media"
    media_index = read_value(f"{what}: media_index", "int", media_index, fix)
    if not 0 <= media_index < len(sample.media):
        raise ArgumentError(f"{what}: media[{media_index}] of {len(sample.media)}. Fix: {fix}")
    medium = sample.media[media_index]
    if medium.modality != "video":
        raise ArgumentError(
            f"{what}: media[{media_index}] is of modality {medium.modality}. Fix: pass a video's index"
        )
    family = get_family(sample.family)
    if family.pooled_frames > 1:
        raise ArgumentError(
            f"{what}: {family.name}'s tower averages {family.pooled_frames} frames into one run of "
            "placeholders, so none can be dropped alone. Fix: make the sample from the shorter video"
        )
    fix = "pass numbers of its temporal patches"
    numbers = np.unique(read_numbers(f"{what}: temporal_patches", temporal_patches, fix))
    patches = medium.grid_thw[0]
    if len(numbers) and not (numbers[0] >= 0 and numbers[-1] < patches):
        raise ArgumentError(
            f"{what}: temporal_patches {numbers.tolist()[:8]}, {medium.media_id!r:.60} has 0 to {patches - 1}. "
            f"Fix: {fix}"
        )
    return family, medium, numbers


def _refuse_lost_loss(sample: Sample, stays: np.ndarray) -> None:
    for i, s in enumerate(sample.loss_spans):
        if not stays[s.start : s.stop].all():
            raise ArgumentError(
                f"drop_frames: loss_spans[{i}] [{s.start}, {s.stop}) of {sample.sample_id!r:.60} covers dropped "
                "tokens. Fix: keep loss spans outside the video"
            )


def _rule_of(sample: Sample, family: Family) -> str | None:
    """The rule that the recorded positions follow; None where none are recorded."""
    if sample.position_ids is None:
        return None
    recorded = (sample.processor or {}).get("position_rule")
    for rule in dict.fromkeys([recorded, *family.position_rules]):
        if rule in family.position_rules and np.array_equal(
            sample_positions(sample, rule)[0], sample.position_ids
        ):
            return rule
    raise ArgumentError(
        f"drop_frames: position_ids of {sample.sample_id!r:.60} follow none of {', '.join(family.position_rules)}. "
        "Fix: set them to None; they are then computed"
    )


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


STAMP = 16  # tokens of a timestamp and of what opens it, at most
_SPANS = ("loss_spans", "observation_spans", "action_spans", "region_spans", "policy_versions")


def spans_to_cut(
    sample: Sample, media_index: int, gone: np.ndarray, family: Family
) -> list[tuple[int, int]]:
    """Token spans of these temporal patches, at each place of the medium."""
    t, h, w = sample.media[media_index].grid_thw
    size = family.vision_tokens((1, h, w))
    spans = [s for s in sample.modality_spans if s.media_index == media_index]
    if family.video_layout != "frames":
        if any(s.chunk is not None for s in spans):
            raise ArgumentError(
                f"drop_frames: the sound of {sample.media[media_index].media_id!r:.60} lies among its "
                "placeholders, placed by its times. Fix: make the sample from the shorter video"
            )
        return [
            (s.start + k * size, s.start + (k + 1) * size) for s in spans for k in gone.tolist()
        ]
    return [
        span
        for at in range(0, len(spans), t)
        for span in _with_timestamps(sample, media_index, spans[at : at + t], gone, family)
    ]


def without_tokens(sample: Sample, stays: np.ndarray, media_index: int, gone: np.ndarray) -> Sample:
    """The sample of the tokens that stay; spans moved, those of the patches `gone` left out."""
    moved = np.concatenate([[0], np.cumsum(stays)])
    out = copy.copy(sample)
    out.input_ids = sample.input_ids[stays]
    if sample.attention_mask is not None:
        out.attention_mask = sample.attention_mask[stays]
    if sample.routed_experts is not None:
        out.routed_experts = sample.routed_experts[stays]

    def place(span: Any, **fields: Any) -> Any:
        bounds = {name: int(moved[getattr(span, name)]) for name in ("start", "stop")}
        return dataclasses.replace(span, **bounds, **fields)

    renumbered = np.cumsum(~np.isin(np.arange(sample.media[media_index].grid_thw[0]), gone)) - 1
    spans = []
    for s in sample.modality_spans:
        mine = s.media_index == media_index and s.frame is not None
        if not (mine and s.frame in gone):
            spans.append(place(s, frame=int(renumbered[s.frame])) if mine else place(s))
    out.modality_spans = spans
    for name in _SPANS:
        if getattr(sample, name) is not None:
            setattr(out, name, [place(s) for s in getattr(sample, name)])
    for name in ("rewards", "costs", "verifiers"):
        if getattr(sample, name) is not None:
            setattr(out, name, [_moved_score(s, moved) for s in getattr(sample, name)])
    if sample.prefix_cached_tokens is not None:
        out.prefix_cached_tokens = int(moved[min(sample.prefix_cached_tokens, len(sample))])
    return out


def _with_timestamps(
    sample: Sample, media_index: int, spans: list[ModalitySpan], gone: np.ndarray, family: Family
) -> list[tuple[int, int]]:
    """Spans to cut at one place of the video, whose temporal patches have `spans`: markers and timestamps with them."""
    starts = [s.start - 1 for s in spans]  # of the markers
    stops = [s.stop + 1 for s in spans]
    ids = sample.input_ids
    opened = all(ids[i] == family.vision_start_id for i in starts)
    closed = stops[-1] <= len(ids) and all(ids[i - 1] == family.vision_end_id for i in stops)
    if not (opened and closed):
        raise ArgumentError(
            f"drop_frames: {sample.sample_id!r:.60} has temporal patches without markers around them. "
            "Fix: pass a sample that the family's processor made"
        )
    if family.texts.frame.startswith("{run}"):  # a patch's time stands behind it
        end = stops[-1]
        if family.video_bounds is not None:
            end += int(np.argmax(ids[end:] == family.video_bounds[1]))
        edges = [*starts, end]
        return [(edges[k], edges[k + 1]) for k in gone.tolist()]
    first = _first_stamp(sample, media_index, starts, stops, family) if 0 in gone else starts[0]
    bounds = [first, *stops]
    # The first id of a timestamp may hold the end of the text before it. Patches that are cut from patch 0 on leave
    # that of patch 0, and take that of the next patch.
    lead = int((np.arange(len(gone)) == gone).sum())
    return [(bounds[k] + (k < lead), bounds[k + 1] + (k < lead)) for k in gone.tolist()]


def _first_stamp(
    sample: Sample, media_index: int, starts: list[int], stops: list[int], family: Family
) -> int:
    """Index of the first token of the first patch's timestamp.

    Behind the outer marker, where it was kept. Else a timestamp has as many tokens as the next one, plus one per
    character more.
    """
    before = sample.input_ids[max(starts[0] - STAMP, 0) : starts[0]]
    outer = np.flatnonzero(np.isin(before, [*family.starts, *family.ends]))
    if len(outer) and before[outer[-1]] == family.vision_start_id:
        return starts[0] - len(before) + int(outer[-1]) + 1
    seconds = frame_seconds(sample.media[media_index], family)
    lengths = [len(frame_text(family, s, "")) for s in seconds[:2]]
    return starts[0] - (starts[1] - stops[0] + lengths[0] - lengths[1])


def _moved_score(score: Any, moved: np.ndarray) -> Any:
    if isinstance(score.scope, dict) and "span" in score.scope:
        span = [int(moved[i]) for i in score.scope["span"]]
        return dataclasses.replace(score, scope={"span": span})
    return score
