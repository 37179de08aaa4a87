"""Temporal patches of a sample's video cut out, or made black: tokens, spans, positions, times and keys follow.

The sample is then what a processor makes of the shorter (or blackened) clip, in the pixel size of the whole one.
Nothing is changed in place. Tokens and spans: `drop_tokens.py`; pixels, times and keys: `drop_media.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import Family, get_family
from mmpack.layout.mrope import sample_positions
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.video.drop_media import blackened, shorter
from mmpack.video.drop_tokens import spans_to_cut, without_tokens
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
