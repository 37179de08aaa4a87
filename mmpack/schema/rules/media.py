"""MM102, MM107 to MM109, MM111 to MM116: grids, token counts, cache keys and times of media."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.items import Items
from mmpack.schema.columns.table import Table
from mmpack.schema.media import Medium
from mmpack.schema.rules.topic import Found, Topic
from mmpack.schema.sample import Sample
from mmpack.schema.specs import INT_MAX


def problems(sample: Sample, family: Family) -> Found:
    seen: dict[str, tuple[int, str | None, tuple[int, int, int]]] = {}
    used = {s.media_index for s in sample.modality_spans}
    for i, medium in enumerate(sample.media):
        field = f"media[{i}]"
        t, h, w = medium.grid_thw
        hears = medium.modality == "audio"
        merge = 1 if hears else family.spatial_merge_size
        if min(t, h, w) == 0 or h % merge or w % merge or (hears and (h, w) != (1, 1)):
            what = "an audio's is [frames, 1, 1]" if hears else f"merge size is {merge}"
            yield "MM102", field, f"has grid {[t, h, w]}, {what}", None
        elif medium.num_tokens != (expected := family.tokens_in(medium)):
            message = f"says num_tokens {medium.num_tokens}, its grid {[t, h, w]} gives {expected}"
            yield "MM108", field, message, None
        if i not in used:
            yield "MM107", field, f"({medium.media_id!r:.60}) has no span", None
        content = (i, medium.content_hash, medium.grid_thw)
        first = seen.setdefault(medium.cache_key, content)
        if first[2] != content[2] or (
            None not in (first[1], content[1]) and first[1] != content[1]
        ):
            yield "MM109", field, f"has the cache key of media[{first[0]}] but other content", None
        for name in ("fps", "second_per_grid_ts"):
            value = getattr(medium, name)
            if value is not None and not 0 <= value < np.inf:
                yield "MM112", field, f"has {name} {value:g}", None
        if medium.modality == "video":
            for code, message in _frames(medium, family):
                yield code, field, message, None
        if hears:
            for message in _of_audio(medium):
                yield "MM116", field, message, None


def _of_audio(medium: Medium) -> Iterator[str]:
    """The last frame may be a part of one: extractors differ in whether they keep it."""
    rate, count, hop = medium.sampling_rate, medium.num_samples, medium.hop_length
    for name, value in (("sampling_rate", rate), ("hop_length", hop)):
        if value == 0:
            yield f"has {name} 0"
    frames = medium.grid_thw[0]
    if count is not None and hop and not count // hop <= frames <= -(-count // hop):
        yield f"has {count} samples, one in {hop} makes {count // hop} frames, its grid has {frames}"


def _frames(medium: Medium, family: Family) -> Iterator[tuple[str, str]]:
    """Of a video: the last temporal patch may be padded, a frame may come twice."""
    t, h, w = medium.grid_thw
    indices, times = medium.frame_indices, medium.frame_timestamps
    counts = [len(listed) for listed in (indices, times) if listed is not None]
    patch = family.temporal_patch_size
    if len(counts) == 2 and counts[0] != counts[1]:
        yield "MM113", f"has {counts[0]} frame_indices and {counts[1]} frame_timestamps"
    if counts and -(-counts[0] // patch) != t:
        yield (
            "MM111",
            f"has {counts[0]} frames, its grid {[t, h, w]} holds {t} patches of {patch}",
        )
    for name, listed in (("frame_indices", indices), ("frame_timestamps", times)):
        values = np.asarray(() if listed is None else listed)
        back = np.flatnonzero(values[1:] < values[:-1])
        if len(back):
            at = int(back[0]) + 1
            yield "MM114", f"has {name}[{at}] {values[at]} after {values[at - 1]}"
    odd = [s for s in times or () if not 0 <= s < np.inf]
    if odd:
        yield "MM112", f"has frame_timestamps {odd[0]:g}"
    last = -1 if indices is None or not len(indices) else int(np.max(indices))
    if medium.total_frames is not None and last >= medium.total_frames:
        yield "MM115", f"has frame {last}, total_frames is {medium.total_frames}"


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    """A cache key that comes twice is left to `problems`."""
    media, spans = table.items("media"), table.items("modality_spans")
    ok = media.good & spans.good
    grids = grids_of(media)
    ok[media.row[tokens_of(table.family, media, grids) != media.numbers("num_tokens")]] = False
    ok[media.row[_wrong_audio(media, table.family, grids)]] = False
    ok[_wrong_times(media, table.family, grids)] = False
    _refuse_repeated(ok, media)
    used = np.zeros(len(media.row), bool)
    index = spans.numbers("media_index")
    named = index < media.counts[spans.row]
    used[media.first[spans.row[named]] + index[named].astype(np.int64)] = True
    ok[media.row[~used]] = False
    return ok


def grids_of(media: Items) -> np.ndarray:
    """float64 [m, 3]: products can't overflow."""
    return media.lists("grid_thw")[1].astype(np.float64).reshape(-1, 3)


def tokens_of(family: Family, media: Items, grids: np.ndarray) -> np.ndarray:
    """float64 [m]: tokens of each medium; -2, as no medium has, of a grid that breaks MM102."""
    t, h, w = grids.T
    merge = family.spatial_merge_size
    bad = (grids == 0).any(axis=1) | (h % merge != 0) | (w % merge != 0)
    found: Any = family.vision_tokens((t, h, w))  # type: ignore[arg-type]
    if family.tokens_by_size is not None:
        found = media.numbers("num_tokens")
    tokens = np.where(bad, -2, found)
    if family.audio is None:
        return tokens
    heard = np.where((t == 0) | (h != 1) | (w != 1), -2, family.audio.tokens(t))
    return np.where(is_audio(media), heard, tokens)


def is_audio(media: Items) -> np.ndarray:
    """bool [m]."""
    return media.codes("modality", ["audio"]) == 0


def _wrong_audio(media: Items, family: Family, grids: np.ndarray) -> np.ndarray:
    """bool [m]: audio that breaks MM116, or that the family does not hear."""
    mine = is_audio(media)
    if family.audio is None or not mine.any():
        return mine
    rate, count, hop = (media.numbers(n) for n in ("sampling_rate", "num_samples", "hop_length"))
    step = np.maximum(hop, 1)
    wrong = (count // step > grids[:, 0]) | (grids[:, 0] > -(-count // step))
    return mine & ((rate == 0) | (hop == 0) | ((count >= 0) & (hop > 0) & wrong))


def _wrong_times(media: Items, family: Family, grids: np.ndarray) -> np.ndarray:
    """Rows that break MM112 to MM115, and MM111 by the number of frames."""
    frames, indices = media.lists("frame_indices")
    stamps, times = media.lists("frame_timestamps")
    counted = np.where(frames >= 0, frames, stamps)
    wrong = (counted >= 0) & (-(-counted // family.temporal_patch_size) != grids[:, 0])
    wrong |= (frames >= 0) & (stamps >= 0) & (frames != stamps)
    wrong |= _goes_back(frames, indices) | _goes_back(stamps, times)
    wrong |= _any(stamps, times < 0)
    total = media.numbers("total_frames", INT_MAX + 1)
    wrong |= _any(frames, indices >= np.repeat(total, _some(frames)))
    wrong &= media.codes("modality", ["video"]) == 0
    wrong |= (media.numbers("fps", 0) < 0) | (media.numbers("second_per_grid_ts", 0) < 0)
    return media.row[wrong]


def _some(lengths: np.ndarray) -> np.ndarray:
    """Lengths of lists, 0 for those that a record lacks."""
    return np.maximum(lengths, 0)


def _any(lengths: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """bool [m]: lists one of whose values, all in one array, is `bad`."""
    out = np.zeros(len(lengths), bool)
    if bad.any():
        out[np.repeat(np.arange(len(lengths)), _some(lengths))[bad]] = True
    return out


def _goes_back(lengths: np.ndarray, values: np.ndarray) -> np.ndarray:
    """bool [m]: lists with a value below the one before it."""
    falls = np.append(False, values[1:] < values[:-1])[: len(values)]
    starts = np.cumsum(_some(lengths)) - _some(lengths)
    falls[starts[lengths > 0]] = False
    return _any(lengths, falls)


def _refuse_repeated(ok: np.ndarray, media: Items) -> None:
    """Rows with a cache key that comes twice become False."""
    if media.is_unique("cache_key"):
        return
    seen = set()
    for place in zip(media.row.tolist(), media.values("cache_key"), strict=True):
        if place in seen:
            ok[place[0]] = False
        seen.add(place)


MEDIA = Topic(
    codes=(
        "MM102",
        "MM107",
        "MM108",
        "MM109",
        "MM111",
        "MM112",
        "MM113",
        "MM114",
        "MM115",
        "MM116",
    ),
    fields=("media", "modality_spans"),
    problems=problems,
    valid=valid,
)
