"""What positions are made of: the grid of each run of placeholders, seconds between temporal patches; all checked."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, check_number
from mmpack.families import Family
from mmpack.layout.runs import Runs
from mmpack.schema.specs import COUNT_MAX

Grids = Sequence[Sequence[int]] | np.ndarray | None


def as_grids(name: str, given: Grids) -> np.ndarray:
    """int64 [n, 3]."""
    try:
        return np.asarray([] if given is None else given, dtype=np.int64).reshape(-1, 3)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"mrope_positions: {name}_grid_thw {reprlib.repr(given):.80} are not grids. "
            f"Fix: pass time, height and width in patches of each {name}, [n, 3]"
        ) from None


def match_grids(
    runs: Runs, images: np.ndarray, videos: np.ndarray, family: Family
) -> tuple[np.ndarray, LayoutError | None]:
    """int64 [O, 3]: the grid of each run, in merged patches; and what contradicts the runs, if anything does.

    Args: `images`, `videos`: int64 [n, 3], patches. Columns behind the third go along as they are.
    """
    out = np.zeros((len(runs), images.shape[1]), dtype=np.int64)
    is_video = runs.is_video
    for name, grids, mine in (("image", images, ~is_video), ("video", videos, is_video)):
        which = mine.nonzero()[0]
        if family.in_pieces(name):
            if name == "image" and family.row_end_id is not None:
                grids = _rows(grids, len(which), family.spatial_merge_size)
            else:
                grids = _frames(grids, len(which), family.pooled_frames if name == "video" else 1)
        if len(grids) != len(which):
            return out, _miscounted(runs, which, name, len(grids))
        out[which] = grids
    merge = family.spatial_merge_size
    patches, cells = out[:, :3], out[:, 1:3]
    if (patches < 1).any() or (cells % merge).any():
        bad = (patches < 1).any(axis=1) | (cells % merge != 0).any(axis=1)
        at = int(np.argmax(bad))
        return out, LayoutError(
            f"mrope_positions: grid {patches[at].tolist()} of the run at token {runs.starts[at]} is empty or "
            f"not a multiple of the merge size {merge}. Fix: pass patches before merging",
            "MM102",
            (int(runs.starts[at]), int(runs.stops[at])),
        )
    cells //= merge  # of `out`
    if family.tokens_by_size is not None:
        return out, None
    # float64: a grid of 2^40 must not wrap around
    tokens = patches.prod(axis=1, dtype=np.float64)
    wrong = tokens != (runs.stops - runs.starts)
    if wrong.any():
        at = int(np.argmax(wrong))
        start, stop = int(runs.starts[at]), int(runs.stops[at])
        grid = (patches[at] * [1, merge, merge]).tolist()
        return out, LayoutError(
            f"mrope_positions: the run [{start}, {stop}) has {stop - start} tokens, its grid "
            f"{grid} gives {tokens[at]:.0f} after merging. "
            "Fix: expand each placeholder to one token per merged patch",
            "MM101",
            (start, stop),
        )
    return out, None


def _miscounted(runs: Runs, which: np.ndarray, name: str, given: int) -> LayoutError:
    span = None
    where = ""
    if len(which) > given:
        at = which[given]
        span = (int(runs.starts[at]), int(runs.stops[at]))
        where = f", the first without one is [{span[0]}, {span[1]})"
    return LayoutError(
        f"mrope_positions: {len(which)} runs of {name} tokens, but {given} grids{where}. "
        f"Fix: pass the grid of each {name} in the ids, and no other",
        "MM107" if span is None else "MM104",
        span,
    )


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
            f"mrope_positions: second_per_grid_ts {reprlib.repr(seconds):.80} are not numbers. "
            "Fix: pass the seconds of each video"
        ) from None


def intervals(
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
    videos = runs.is_video.nonzero()[0]
    if not len(videos) and second_per_grid_ts is None:
        return out
    seconds = seconds_of(second_per_grid_ts, len(videos))
    steps: np.ndarray = np.trunc(seconds) if rule == "grid_int" else seconds
    out[videos] = steps.astype(out.dtype) * positions_per_second(config, tokens_per_second, family)
    return out


def positions_per_second(config: Any, given: float | None, family: Family) -> float:
    """Positions per second: the one given, else of a config, else of released models."""
    vision = getattr(config, "vision_config", config)
    known = (
        given,
        getattr(vision, "tokens_per_second", None),
        getattr(config, "position_id_per_seconds", None),
        family.tokens_per_second,
    )
    found = next(n for n in known if n)
    check_number("mrope_positions", "tokens_per_second", found, above=0, most=float(COUNT_MAX))
    return float(found)


def seconds_of(given: Sequence[float] | np.ndarray | None, videos: int) -> np.ndarray:
    """float32 [videos]."""
    seconds = _floats(np.ones(videos) if given is None else given)
    if len(seconds) != videos or not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ArgumentError(
            f"mrope_positions: second_per_grid_ts has {len(seconds)} values for {videos} videos, or a negative "
            "or infinite one. Fix: pass the seconds of each video"
        )
    return seconds


def frames_of_audio(given: Sequence[int] | np.ndarray | None) -> np.ndarray:
    """int64 [n, 3]: (feature frames, 1, 1) of each audio."""
    try:
        frames = np.asarray([] if given is None else given, dtype=np.int64).reshape(-1, 1)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"mrope_positions: audio_feature_lengths {reprlib.repr(given):.80} are not lengths. "
            "Fix: pass the feature frames of each audio, [n]"
        ) from None
    return np.concatenate([frames, np.ones((len(frames), 2), np.int64)], axis=1)
