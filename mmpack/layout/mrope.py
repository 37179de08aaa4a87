"""Multimodal rotary positions (rows temporal, height, width) of one sample, vectorised over its placeholder runs.

Rules in the wild for where text goes on after a medium that started at position s:
`grid`: s + max(h, w) // merge (transformers from 5.3 on); `max`: the largest position so far + 1 (before it, and vLLM,
which multiplies seconds in float64, all others in float32);
`grid_int`: as `grid`, and a video's seconds are cut to whole ones first (transformers 5.3 to 5.18, Qwen2.5-VL);
`seconds`: as `max`, and a second is so many positions of a video and of audio (layout/tmrope.py);
`count`: every token one further (families with one row).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family, get_family
from mmpack.layout.occurrences import occurring_media
from mmpack.layout.runs import Runs, placeholder_runs
from mmpack.layout.tmrope import positions_by_seconds
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

Grids = Sequence[Sequence[int]] | np.ndarray | None


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
        media = {name: _grids(name, grids) for name, grids in given.items()}
        media["audio"] = _frames_of_audio(audio_feature_lengths)
        steps = _seconds(second_per_grid_ts, len(media["video"]))
        per_second = _per_second(config, tokens_per_second, family)
        return positions_by_seconds(len(ids), runs, media, steps, per_second, family)
    grids = _grids_of_runs(runs, image_grid_thw, video_grid_thw, family)
    if rule == "count":
        return np.arange(len(ids), dtype=np.int64)[None], 0
    interval = _intervals(runs, second_per_grid_ts, config, tokens_per_second, family, rule)
    return _positions(len(ids), runs, grids, interval, family.spatial_merge_size, rule)


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


def _positions(
    length: int, runs: Runs, grids: np.ndarray, interval: np.ndarray, merge: int, rule: str
) -> tuple[np.ndarray, int]:
    t, h, w = grids[:, 0], grids[:, 1] // merge, grids[:, 2] // merge
    last_t = ((t - 1).astype(interval.dtype) * interval).astype(np.int64)
    if rule != "max":
        advance = np.maximum(grids[:, 1], grids[:, 2]) // merge
    else:
        advance = np.maximum(np.maximum(h, w), last_t + 1)
    sizes = runs.stops - runs.starts
    # shift of the text after each run, and the position at which each run starts
    gained = np.concatenate([[0], np.cumsum(advance - sizes)])
    begin = runs.starts + gained[:-1]

    after = np.zeros(length + 1, dtype=np.int64)
    np.add.at(after, runs.stops, advance - sizes)
    text = np.arange(length) + np.cumsum(after)[:length]
    positions = np.broadcast_to(text, (3, length)).copy()

    run = np.repeat(np.arange(len(runs)), sizes)
    rows = np.arange(len(run)) + np.repeat(runs.starts - (np.cumsum(sizes) - sizes), sizes)
    k = rows - runs.starts[run]
    frame, cell = k // (h * w)[run], k % (h * w)[run]
    positions[0, rows] = begin[run] + (frame.astype(interval.dtype) * interval[run]).astype(
        np.int64
    )
    positions[1, rows] = begin[run] + cell // w[run]
    positions[2, rows] = begin[run] + cell % w[run]
    return positions, (int(positions.max()) + 1 - length) if length else 0


def _grids(name: str, given: Grids) -> np.ndarray:
    """int64 [n, 3]."""
    try:
        return np.asarray([] if given is None else given, dtype=np.int64).reshape(-1, 3)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"mrope_positions: {name}_grid_thw {reprlib.repr(given):.80} are no grids. "
            f"Fix: pass time, height and width in patches of each {name}, [n, 3]"
        ) from None


def _grids_of_runs(runs: Runs, images: Grids, videos: Grids, family: Family) -> np.ndarray:
    """int64 [O, 3]: the grid of each run, checked against the run's length."""
    out = np.zeros((len(runs), 3), dtype=np.int64)
    for name, given, mine in (
        ("image", images, ~runs.is_video),
        ("video", videos, runs.is_video),
    ):
        grids = _grids(name, given)
        if family.in_pieces(name):
            count = int(mine.sum())
            if name == "image" and family.row_end_id is not None:
                grids = _rows(grids, count, family.spatial_merge_size)
            else:
                grids = _frames(grids, count, family.pooled_frames if name == "video" else 1)
        which = np.flatnonzero(mine)
        if len(grids) != len(which):
            span = None
            where = ""
            if len(which) > len(grids):
                at = which[len(grids)]
                span = (int(runs.starts[at]), int(runs.stops[at]))
                where = f", the first without one is [{span[0]}, {span[1]})"
            raise LayoutError(
                f"mrope_positions: {len(which)} runs of {name} tokens, {len(grids)} grids{where}. "
                f"Fix: pass the grid of each {name} in the ids, and no other",
                "MM104" if len(which) > len(grids) else "MM107",
                span,
            )
        out[which] = grids
    merge = family.spatial_merge_size
    bad = (out < 1).any(axis=1) | (out[:, 1:] % merge != 0).any(axis=1)
    if bad.any():
        at = int(np.argmax(bad))
        raise LayoutError(
            f"mrope_positions: grid {out[at].tolist()} of the run at token {runs.starts[at]} is empty "
            f"or no multiple of the merge size {merge}. Fix: pass patches before merging",
            "MM102",
            (int(runs.starts[at]), int(runs.stops[at])),
        )
    # float64 first: a grid of 2^40 must not wrap around
    exact = out[:, 0].astype(np.float64) * (out[:, 1] // merge) * (out[:, 2] // merge)
    wrong = exact != (runs.stops - runs.starts)
    if wrong.any():
        at = int(np.argmax(wrong))
        start, stop = int(runs.starts[at]), int(runs.stops[at])
        raise LayoutError(
            f"mrope_positions: the run [{start}, {stop}) has {stop - start} tokens, its grid "
            f"{out[at].tolist()} gives {exact[at]:.0f} after merging. "
            "Fix: expand one placeholder per merged patch",
            "MM101",
            (start, stop),
        )
    return out


def _rows(images: np.ndarray, most: int, merge: int) -> np.ndarray:
    """Grids [n, 3] of images as grids of one row of merged patches each; at most `most` + 1 per image."""
    heights = np.maximum(images[:, 1], 0)
    rows = np.repeat(images, np.clip(heights // merge, 1, most + 1), axis=0)
    # no whole row: the grid stays as it is, to be refused
    whole = rows[:, 1] % merge == 0
    rows[whole, 1] = np.minimum(rows[whole, 1], merge)
    return rows


def _frames(videos: np.ndarray, most: int, pooled: int) -> np.ndarray:
    """Grids [n, 3] as grids of t = 1, one per `pooled` temporal patches, or per tile; at most `most` + 1 of each."""
    frames = np.repeat(videos, np.clip(-(-videos[:, 0] // pooled), 1, most + 1), axis=0)
    # an empty grid stays empty
    frames[:, 0] = np.minimum(frames[:, 0], 1)
    return frames


def _floats(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    # a tensor may be bfloat16, which numpy lacks
    values = seconds.tolist() if hasattr(seconds, "tolist") else seconds
    try:
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype=np.float32).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"mrope_positions: second_per_grid_ts {reprlib.repr(seconds):.80} are no numbers. "
            "Fix: pass the seconds of each video"
        ) from None


def _intervals(
    runs: Runs,
    second_per_grid_ts: Sequence[float] | np.ndarray | None,
    config: Any,
    tokens_per_second: float | None,
    family: Family,
    rule: str,
) -> np.ndarray:
    """float [O]: positions between temporal patches, rounded as upstream rounds them."""
    out = np.ones(len(runs), dtype=np.float64 if rule == "max" else np.float32)
    if family.tokens_per_second is None:
        return out
    per_second = _per_second(config, tokens_per_second, family)
    videos = np.flatnonzero(runs.is_video)
    seconds = _seconds(second_per_grid_ts, len(videos))
    steps: np.ndarray = np.trunc(seconds) if rule == "grid_int" else seconds
    out[videos] = steps.astype(out.dtype) * per_second
    return out


def _per_second(config: Any, given: float | None, family: Family) -> float:
    """Positions per second: the one given, else of a config, else of released models."""
    vision = getattr(config, "vision_config", config)
    known = (
        given,
        getattr(vision, "tokens_per_second", None),
        getattr(config, "position_id_per_seconds", None),
        family.tokens_per_second,
    )
    return float(next(n for n in known if n))


def _seconds(given: Sequence[float] | np.ndarray | None, videos: int) -> np.ndarray:
    """float32 [videos]."""
    seconds = _floats(np.ones(videos) if given is None else given)
    if len(seconds) != videos or not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ArgumentError(
            f"mrope_positions: second_per_grid_ts has {len(seconds)} values for {videos} videos, "
            "or one that is negative or not finite. Fix: pass the seconds of each video"
        )
    return seconds


def _frames_of_audio(given: Sequence[int] | np.ndarray | None) -> np.ndarray:
    """int64 [n, 3]: (feature frames, 1, 1) of each audio."""
    try:
        frames = np.asarray([] if given is None else given, dtype=np.int64).reshape(-1, 1)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"mrope_positions: audio_feature_lengths {reprlib.repr(given):.80} are no lengths. "
            "Fix: pass the feature frames of each audio, [n]"
        ) from None
    return np.concatenate([frames, np.ones((len(frames), 2), np.int64)], axis=1)
