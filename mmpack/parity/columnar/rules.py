"""Which of many rows are sound: the rules of `mmpack.schema.rules` and `Sample.from_dict`, by columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mmpack.errors import require
from mmpack.families import Family
from mmpack.parity.columnar.items import Items
from mmpack.parity.columnar.numbers import Numbers, same_slices
from mmpack.parity.columnar.table import Rows
from mmpack.parity.columnar.texts import DOUBTED, each_fits
from mmpack.schema.fields import INT_MAX, Array, Ints, Json, Records, Spec
from mmpack.schema.places import FIELDS, NORMALIZED, ROUNDING
from mmpack.schema.sample import Sample, vocabulary_size
from mmpack.schema.spans import MODALITIES

FAR = 2**40  # beyond any index
CACHED_IDS = 2**15


def sound(rows: Rows, max_record_bytes: int) -> np.ndarray:
    """bool [n]: rows that `Sample.from_dict` takes as they are (padding is not cut off) and that break no rule."""
    if sum(column.nbytes for column in rows.columns.values()) > max_record_bytes:
        return np.zeros(rows.rows, bool)
    ok = _structure(rows)
    if ok.any():
        ok &= rows.once("layout", _layout, "input_ids", "media", "modality_spans", "loss_spans")
    if ok.any():
        ok &= _arrays(rows) & _other_spans(rows) & _scores(rows)
    return ok


# ---- structure -----------------------------------------------------------------------------------


def _structure(rows: Rows) -> np.ndarray:
    """What the specs of the columns say, each for itself."""
    specs = Sample.columns()
    ok = np.ones(rows.rows, bool)
    for name, declared in specs.items():
        if declared.required or name == "schema_version":
            ok &= rows.present(name)
    for name, column in rows.columns.items():
        if name in specs:
            ok &= rows.once(f"structure of {name}", _of_spec(name, specs[name].spec), name)
        elif not _is_plain(column.type):
            ok &= ~rows.present(name)
    return ok


def _of_spec(name: str, spec: Spec) -> Callable[[Rows], Any]:
    def check(rows: Rows) -> Any:
        if isinstance(spec, Array):
            numbers = rows.numbers(name)
            if numbers is None:
                return False
            return numbers.each(_in_range) if spec.dtype.startswith("int") else True
        if isinstance(spec, Records):
            return rows.items(name).good
        if isinstance(spec, Json):
            return np.array([v is not DOUBTED for v in rows.objects(name)])
        return each_fits(spec, rows.values(name))

    return check


def _is_plain(kind: Any) -> bool:
    """A column of no field, whose values any sample can carry in `metadata`."""
    types = require("pyarrow", "parquet", "read_trace of a .parquet file").types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)


def _in_range(flat: np.ndarray) -> bool:
    """Integers in [0, INT_MAX]."""
    if flat.dtype == np.int64:
        return not flat.size or flat.view(np.uint64).max() <= INT_MAX  # negative ones are huge
    if flat.size and flat.dtype.kind in "iu":
        return bool(flat.min() >= 0 and flat.max() <= INT_MAX)
    return not flat.size


# ---- rules ---------------------------------------------------------------------------------------


def _layout(rows: Rows) -> np.ndarray:
    """Media, modality spans and loss spans over the ids: MM1xx, MM201 to MM203."""
    family, ids = rows.family, rows.numbers("input_ids")
    media, spans, loss = (rows.items(n) for n in ("media", "modality_spans", "loss_spans"))
    if ids is None:
        return np.zeros(rows.rows, bool)
    ok = media.good & spans.good & loss.good
    grids = media.lists("grid_thw")[1].astype(np.float64).reshape(-1, 3)  # products can't overflow
    tokens = _vision_tokens(family, grids)
    ok[media.row[tokens != media.numbers("num_tokens")]] = False
    ok[_wrong_times(media, family, grids)] = False
    _refuse_twice(ok, media)
    lengths = ids.lengths

    row, start, stop = spans.row, spans.numbers("start"), spans.numbers("stop")
    index = spans.numbers("media_index")
    wrong = (start < _before(row, stop)) | (start >= stop) | (stop > lengths[row])
    newest = np.maximum.accumulate(row * FAR + index) - row * FAR
    wrong |= (index >= media.counts[row]) | (index > _before(row, newest, -1) + 1)
    ok[row[wrong]] = False
    kept = ok[row]
    row, start, stop, index = row[kept], start[kept], stop[kept], index[kept]
    code = _bits(spans)[kept]
    medium = (np.cumsum(media.counts) - media.counts)[row] + index
    ok[row[code != _bits(media)[medium]]] = False
    unused = np.ones(len(media.row), bool)
    unused[medium] = False
    ok[media.row[unused]] = False
    framed = (code == _bit("video")) & (family.video_layout == "frames")
    ok[row[~framed & (stop - start != tokens[medium])]] = False
    frame = spans.numbers("frame")[kept]
    patches = np.maximum(grids[:, 0], 1).astype(np.int64)
    unlike = _wrong_frames(frame[framed], medium[framed], (stop - start)[framed], patches, tokens)
    ok[media.row[unlike]] = False

    first = ids.bounds[:-1].astype(np.int64)
    starts, stops = first[row] + start, first[row] + stop
    placeholders = family.placeholder_ids
    ok[row[~np.isin(code, [_bit(modality) for modality in placeholders])]] = False
    each = _found(ids.flat, [*placeholders.values()])
    for modality, found in zip(placeholders, each, strict=True):
        mine = code == _bit(modality)
        ok &= _only_within(found, ids.bounds, starts[mine], stops[mine])

    row, start, stop = loss.row, loss.numbers("start"), loss.numbers("stop")
    ok[row[(start < _before(row, stop)) | (start > stop) | (stop > lengths[row])]] = False
    ok[row[(start == 0) | _overlaps(first[row] + start, first[row] + stop, starts, stops)]] = False
    return ok


def _found(flat: np.ndarray, tokens: list[int]) -> np.ndarray:
    """bool [tokens, ids]: where each token is; ids come from memory once, a block at a time."""
    found = np.empty((len(tokens), len(flat)), bool)
    for start in range(0, len(flat), CACHED_IDS):
        block = slice(start, start + CACHED_IDS)
        for token, out in zip(tokens, found[:, block], strict=True):
            np.equal(flat[block], token, out=out)
    return found


def _only_within(
    found: np.ndarray, bounds: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray:
    """bool [n]: rows [bounds] where `found` holds in the sorted, disjoint [starts, stops), and nowhere else."""
    inner = np.flatnonzero(found[1:] != found[:-1]) + 1
    edges = np.concatenate([found[:1].nonzero()[0], inner, found[-1:].nonzero()[0] + len(found)])
    touching = starts[1:] == stops[:-1]  # two spans, one run
    said = np.empty(2 * len(starts), np.int64)
    said[::2], said[1::2] = starts, stops
    kept = np.ones(len(said), bool)
    kept[1:-1].reshape(-1, 2)[touching] = False
    if np.array_equal(edges, said[kept]):
        return np.ones(len(bounds) - 1, bool)
    wanted = np.zeros(len(found), bool)
    for a, b in zip(starts.tolist(), stops.tolist(), strict=True):
        wanted[a:b] = True
    return same_slices(found, bounds, wanted, bounds)


def _bits(items: Items) -> np.ndarray:
    """uint8 [m]: of the modality."""
    return (1 << items.codes("modality", MODALITIES)).astype(np.uint8)


def _bit(modality: str) -> np.uint8:
    return np.uint8(1 << MODALITIES.index(modality))


def _vision_tokens(family: Family, grids: np.ndarray) -> np.ndarray:
    """float64 [m]: tokens of each grid; -2, as no medium has, of a grid that breaks MM102."""
    t, h, w = grids.T
    merge = family.spatial_merge_size
    bad = (grids == 0).any(axis=1) | (h % merge != 0) | (w % merge != 0)
    return np.where(bad, -2, family.vision_tokens((t, h, w)))  # type: ignore[arg-type]


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
    wrong &= _bits(media) == _bit("video")
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


def _refuse_twice(ok: np.ndarray, media: Items) -> None:
    """Rows with a cache key twice (whether of one content, MM109 says)."""
    if media.is_unique("cache_key"):
        return
    seen = set()
    for place in zip(media.row.tolist(), media.values("cache_key"), strict=True):
        if place in seen:
            ok[place[0]] = False
        seen.add(place)


def _before(row: np.ndarray, values: np.ndarray, first: int = 0) -> np.ndarray:
    """Of each item, the value of the item before it in its row."""
    out = np.full(len(row), first, np.int64)
    follows = np.flatnonzero(row[1:] == row[:-1]) + 1
    out[follows] = values[follows - 1]
    return out


def _wrong_frames(
    frame: np.ndarray,
    medium: np.ndarray,
    tokens: np.ndarray,
    patches: np.ndarray,
    needed: np.ndarray,
) -> np.ndarray:
    """Media whose spans are not one a temporal patch, in order, of all its tokens (any number of times)."""
    if not len(medium):
        return medium
    order = np.argsort(medium, kind="stable")
    frame, medium, tokens = frame[order], medium[order], tokens[order]
    heads = np.flatnonzero(np.diff(medium, prepend=-1))
    counts = np.diff(heads, append=len(medium))
    of = medium[heads]
    place = np.arange(len(medium)) - np.repeat(heads, counts)
    wrong = (counts % patches[of] != 0) | (
        np.add.reduceat(tokens, heads) != needed[of] * (counts // patches[of])
    )
    return np.concatenate([of[wrong], medium[frame != place % patches[medium]]])


def _overlaps(
    start: np.ndarray, stop: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray:
    """bool: which of [start, stop) share a token with the sorted, disjoint [starts, stops)."""
    before = np.searchsorted(stops, start, "right")  # those that end there or earlier
    return (start < stop) & (np.searchsorted(starts, stop, "left") > before)


def _arrays(rows: Rows) -> np.ndarray:
    """Shapes against the ids, values against their rules. A mask with a zero is left to `Sample.from_dict`."""
    ok = np.ones(rows.rows, bool)
    ids = rows.numbers("input_ids")
    assert ids is not None
    lengths = ids.lengths
    if "position_ids" in rows.columns:
        positions, height = rows.numbers("position_ids"), rows.family.position_rows
        assert positions is not None
        heights = np.diff(positions.outer)
        row = np.repeat(np.arange(rows.rows), heights)
        ok &= (heights == height) | ~rows.present("position_ids")
        ok[row[positions.widths != lengths[row]]] = False
    if "attention_mask" in rows.columns:
        mask = rows.numbers("attention_mask")
        assert mask is not None
        ok &= (mask.lengths == lengths) | ~rows.present("attention_mask")
        ok &= mask.each(lambda flat: (flat == 1).all())
    if "rollout_logprobs" in rows.columns:
        logprobs, loss = rows.numbers("rollout_logprobs"), rows.items("loss_spans")
        assert logprobs is not None
        scored = np.bincount(loss.row, loss.numbers("stop") - loss.numbers("start"), rows.rows)
        ok &= (logprobs.lengths == scored) | ~rows.present("rollout_logprobs")
        ok &= logprobs.each(_are_logprobs)
    ok &= _within_vocabularies(rows, ids)
    cached = rows.values("prefix_cached_tokens")
    return ok & [(v or 0) <= n for v, n in zip(cached, lengths.tolist(), strict=True)]


def _within_vocabularies(rows: Rows, ids: Numbers) -> np.ndarray:
    """bool [n]: MM312. Also false for rows without ids, if any row names a size."""
    sizes = [vocabulary_size(p) if isinstance(p, dict) else None for p in rows.objects("processor")]
    known = [size for size in sizes if size is not None]
    if not known or (ids.flat.size and ids.flat.max() < min(known)):
        return np.ones(rows.rows, bool)
    return np.array([size is None for size in sizes], bool)


def _are_logprobs(flat: np.ndarray) -> bool:
    # NaN is in no range
    return not flat.size or bool(
        np.finfo(np.float32).min <= flat.min() and flat.max().astype(np.float32) <= 1e-4
    )


def _other_spans(rows: Rows) -> np.ndarray:
    """MM106, MM204 to MM206, MM303, MM308, MM310, MM311."""
    ok = np.ones(rows.rows, bool)
    ids = rows.numbers("input_ids")
    assert ids is not None
    lengths, first = ids.lengths, ids.bounds[:-1].astype(np.int64)
    for name in ("observation_spans", "action_spans", "region_spans", "policy_versions"):
        if name not in rows.columns:
            continue
        spans = rows.items(name)
        row, start, stop = spans.row, spans.numbers("start"), spans.numbers("stop")
        ok[row[(start > stop) | (stop > lengths[row])]] = False
        if name in ("observation_spans", "policy_versions"):
            ok[row[start < _before(row, stop)]] = False
        if name == "observation_spans":
            loss, kept = rows.items("loss_spans"), ok[row] & (start < stop)
            at = first[loss.row]
            begin, end = at + loss.numbers("start"), at + loss.numbers("stop")
            shift = first[row[kept]]
            hit = _overlaps(begin, end, shift + start[kept], shift + stop[kept])
            ok[loss.row[hit]] = False
    placed = np.zeros(rows.rows, bool)
    counts = rows.items("media").counts
    for name in ("region_spans", "bbox_targets", "point_targets"):
        if name not in rows.columns:
            continue
        places = rows.items(name)
        ok[places.row[places.numbers("media_index") >= counts[places.row]]] = False
        for field in ("bbox", "point"):
            placed[places.row[places.has(field)]] = True
    return ok & ~(placed & ~rows.present("coordinate_system")) & _places(rows)


def _places(rows: Rows) -> np.ndarray:
    """MM310 and MM311."""
    ok = np.ones(rows.rows, bool)
    media, family = rows.items("media"), rows.family
    grids = media.lists("grid_thw")[1].reshape(-1, 3)
    sides = grids[:, :0:-1] * float(family.patch_size)  # [m, 2] width, height
    if family.pixel_layout == "tiles":
        sides[grids[:, 0] > 1] = np.inf
    known = each_fits(Ints(2), rows.values("screen_size"))
    screens = [
        s if s and fits else (-1, -1)
        for s, fits in zip(rows.values("screen_size"), known, strict=True)
    ]
    screen = np.array(screens, np.float64).reshape(-1, 2)
    systems = rows.values("coordinate_system")
    normalized = np.array([NORMALIZED.get(s, 0.0) if isinstance(s, str) else 0.0 for s in systems])
    first = np.cumsum(media.counts) - media.counts
    for name in FIELDS:
        if name not in rows.columns:
            continue
        items = rows.items(name)
        row, index = items.row, items.numbers("media_index").astype(np.int64)
        limits = screen[row]
        shown = (index >= 0) & (index < media.counts[row])
        limits[shown] = np.maximum(limits[shown], sides[first[row[shown]] + index[shown]])
        limits[limits[:, 0] < 0] = np.inf
        limits = np.where(normalized[row, None] > 0, normalized[row, None], limits)
        slack = ROUNDING * np.where(np.isfinite(limits), limits, 1.0)
        for field, width in (("bbox", 4), ("point", 2)):
            lengths, flat = items.lists(field)
            has = lengths == width
            numbers = flat.reshape(-1, width // 2, 2)
            most, least = (limits + slack)[has][:, None], -slack[has][:, None]
            wrong = ((numbers < least) | (numbers > most)).any(axis=(1, 2))
            if width == 4:
                wrong |= (numbers[:, 0] > numbers[:, 1]).any(axis=1)
            ok[row[has][wrong]] = False
    return ok


def _scores(rows: Rows) -> np.ndarray:
    """MM304 and MM305. What is paid for less than the whole sequence is left to them."""
    ok = np.ones(rows.rows, bool)
    loss = rows.items("loss_spans")
    empty = np.bincount(loss.row, loss.numbers("stop") - loss.numbers("start"), rows.rows) == 0
    for name in ("rewards", "costs"):
        if name in rows.columns:
            scores = rows.items(name)
            partial = [scope not in (None, "sequence") for scope in scores.values("scope")]
            ok[scores.row[np.array(partial, bool)]] = False
            paid = scores.row[scores.numbers("value", 0) != 0]
            ok[paid[empty[paid]]] = False
    return ok
