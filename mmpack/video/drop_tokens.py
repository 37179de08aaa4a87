"""Tokens and spans of a sample from which temporal patches of a video are cut."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import Family
from mmpack.layout.seconds import frame_seconds, frame_text
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ModalitySpan

STAMP = 16  # tokens of a timestamp and of what opens it, at most
_SPANS = (
    "loss_spans",
    "observation_spans",
    "action_spans",
    "region_spans",
    "policy_versions",
)


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
