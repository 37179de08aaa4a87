"""Multimodal rotary positions (rows temporal, height, width) of one sample; of many: layout/batch_positions.py.

Rules in the wild for where text goes on after a medium that started at position s:
`grid`: s + max(h, w) // merge (transformers from 5.3 on); `max`: the largest position so far + 1 (before it, and vLLM,
which multiplies seconds in float64, all others in float32);
`grid_int`: as `grid`, and a video's seconds are cut to whole ones first (transformers 5.3 to 5.18, Qwen2.5-VL);
`seconds`: as `max`, and a second is so many positions of a video and of audio (layout/tmrope.py);
`count`: every token one further (families with one row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import Family, get_family
from mmpack.layout.grids import (
    Grids,
    as_grids,
    frames_of_audio,
    intervals,
    match_grids,
    positions_per_second,
    seconds_of,
)
from mmpack.layout.lines import placed_runs, positions_of_lines
from mmpack.layout.occurrences import occurring_media
from mmpack.layout.runs import placeholder_runs
from mmpack.layout.tmrope import positions_by_seconds
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample


def mrope_positions(
    input_ids: Sequence[int] | np.ndarray,
    family: str | Family,
    config: Any = None,
    image_grid_thw: Grids = None,
    video_grid_thw: Grids = None,
    second_per_grid_ts: Sequence[float] | np.ndarray | None = None,
    rule: str | None = None,
    tokens_per_second: float | None = None,
    audio_feature_lengths: Sequence[int] | np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Positions of one unpadded, expanded sample, equal to transformers' `get_rope_index` (rule `grid`).

    Args:
        input_ids: int [L], one id per vision token.
        family: a name of `mmpack.families`, or a Family.
        config: a transformers config; its `vision_config.tokens_per_second` is used if it has one.
        image_grid_thw, video_grid_thw: [n, 3] patches before merging, in order of appearance; one per video, also where
            each of its temporal patches is a run of its own.
        second_per_grid_ts: [videos] seconds between temporal patches; 1.0 each if not given.
        rule: one of the family's `position_rules`; by default its first (`grid` of every Qwen-VL).
        tokens_per_second: temporal positions per second; else `config`'s, else that of released models.
        audio_feature_lengths: [n] feature frames of each audio in order, a video's sound included.

    Returns: int64 [3, L] ([1, L] where the family has one row) and `rope_delta` = max(position) + 1 - L.
    Raises: LayoutError naming the span, where runs and grids contradict each other; ArgumentError.

    Example: a picture of 2 × 2 merged patches between two text tokens; rows are time, height, width.
        >>> import mmpack as mp
        >>> image = 151655
        >>> positions, delta = mp.mrope_positions(
        ...     [7, image, image, image, image, 8], "qwen2_vl", image_grid_thw=[[1, 4, 4]]
        ... )
        >>> positions.tolist(), delta
        ([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]], -2)
    """
    family = get_family(family)
    rule = family.position_rules[0] if rule is None else rule
    if rule not in family.position_rules:
        known = ", ".join(family.position_rules)
        raise ArgumentError(f"mrope_positions: rule {rule!r} is unknown. Fix: use one of {known}")
    ids = np.asarray(input_ids)
    if ids.ndim != 1:
        raise ArgumentError(
            f"mrope_positions: input_ids has shape {list(ids.shape)}, expected [L]. "
            "Fix: pass one unpadded sample"
        )
    runs = placeholder_runs(ids, family)
    if rule == "seconds":
        given = {"image": image_grid_thw, "video": video_grid_thw}
        media = {name: as_grids(name, grids) for name, grids in given.items()}
        media["audio"] = frames_of_audio(audio_feature_lengths)
        steps = seconds_of(second_per_grid_ts, len(media["video"]))
        per_second = positions_per_second(config, tokens_per_second, family)
        return positions_by_seconds(len(ids), runs, media, steps, per_second, family)
    images, videos = as_grids("image", image_grid_thw), as_grids("video", video_grid_thw)
    grids, fault = match_grids(runs, images, videos, family)
    if fault is not None:
        raise fault
    length = len(ids)
    if rule == "count":
        return np.arange(length, dtype=np.int64)[None], 0
    interval = intervals(runs, second_per_grid_ts, config, tokens_per_second, family, rule)
    first = np.zeros(len(runs), np.int64)
    placed = placed_runs(runs, first, grids, interval, rule)
    positions = positions_of_lines(np.array([0, length]), placed)
    return positions, (int(positions.max()) + 1 - length) if length else 0


def sample_positions(
    sample: Sample, rule: str | None = None, family: Family | None = None
) -> tuple[np.ndarray, int]:
    """`mrope_positions` of a Sample, from its media; rule and tokens_per_second from its `processor`.

    `family`: the sample's, if it is known already.
    """
    settings = sample.processor or {}
    return mrope_positions(
        sample.input_ids,
        sample.family if family is None else family,
        **grids_of_media(occurring_media(sample)),
        rule=rule or settings.get("position_rule"),
        tokens_per_second=settings.get("tokens_per_second"),
    )


def grids_of_media(media: Sequence[Medium]) -> dict[str, Any]:
    """What `mrope_positions` takes of media: grids of images and of videos, seconds of these (1.0 where none are
    recorded), and feature frames of audio.

    Args: `media`: in order of appearance, one per occurrence.
    """
    videos = [m for m in media if m.modality == "video"]
    seconds = [1.0 if m.second_per_grid_ts is None else m.second_per_grid_ts for m in videos]
    return {
        "image_grid_thw": [m.grid_thw for m in media if m.modality == "image"] or None,
        "video_grid_thw": [m.grid_thw for m in videos] or None,
        "second_per_grid_ts": seconds or None,
        "audio_feature_lengths": [m.grid_thw[0] for m in media if m.modality == "audio"] or None,
    }
