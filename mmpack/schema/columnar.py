"""Many rows of a Parquet trace at once: which of them surely hold a sample that can be read and breaks no rule.

A filter in front of `Sample.read` and `problems_of`, for speed alone: a row that is not sound isn't called broken,
it goes through them. n rows of one family; m items of a column of records, `row` [m] says whose each is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from mmpack.errors import require
from mmpack.families import Family
from mmpack.schema.fields import (
    INT_MAX,
    Array,
    Float,
    Floats,
    Int,
    Ints,
    Json,
    Record,
    Records,
    Spec,
    Str,
    json_fault,
)
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ScopeSpec

T = TypeVar("T")
MODALITY_BITS = {"image": 1, "video": 2}
FAR = 2**40  # beyond any index
DOUBTED: Any = object()  # in place of JSON that needs another look


class Rows:
    """Columns of n rows, parsed when they are asked for; those without a value are left out."""

    def __init__(self, columns: dict[str, Any], rows: int, family: Family) -> None:
        self.columns = {name: c for name, c in columns.items() if c.null_count < rows}
        self.rows = rows
        self.family = family
        self.twin: Rows | None = None
        self.shared: set[str] = set()
        self._made: dict[str, Any] = {}

    def adopt(self, other: Rows) -> None:
        """Take over what `other` made of the columns that are equal on both sides."""
        self.twin = other
        self.shared = {
            name
            for name, column in self.columns.items()
            if name in other.columns and column.equals(other.columns[name])
        }

    def present(self, name: str) -> np.ndarray:
        """bool [n]."""
        if name not in self.columns:
            return np.zeros(self.rows, bool)
        return self.columns[name].is_valid().to_numpy(zero_copy_only=False)

    def values(self, name: str) -> list[Any]:
        """Texts and scalars as Python has them."""
        if name not in self.columns:
            return [None] * self.rows
        return self.once(name, lambda rows: rows.columns[name].to_pylist())

    def numbers(self, name: str) -> Numbers | None:
        """A column of lists of numbers; None if there is none, it is of another type or has a null within."""
        if name not in self.columns:
            return None
        spec = Sample.columns()[name].spec
        depth = 2 if isinstance(spec, Array) and spec.rows is not None else 1
        return self.once(name, lambda rows: _numbers(rows.columns[name], depth))

    def objects(self, name: str) -> list[Any]:
        """Free objects; None where there is none, DOUBTED for what is none."""
        return self.once(f"{name} as objects", lambda rows: _objects(rows.values(name)), name)

    def items(self, name: str) -> Items:
        """A column of records."""
        if name not in self.columns:
            return self.once(name, lambda rows: _items([None] * rows.rows, Record))
        spec: Any = Sample.columns()[name].spec
        return self.once(f"{name} as items", lambda rows: _items(rows.values(name), spec.cls), name)

    def once(self, key: str, make: Callable[[Rows], T], *names: str) -> T:
        """`make` of the rows, made once, by the twin if the columns `names` (else `key`) are equal there."""
        if self.twin is not None and self.shared.issuperset(names or (key,)):
            return self.twin.once(key, make, *names)
        if key not in self._made:
            self._made[key] = make(self)
        return self._made[key]


@dataclass
class Numbers:
    """A column of lists, or of lists of lists: row i is `flat[bounds[i]:bounds[i + 1]]`.

    Its lists are `widths[outer[i]:outer[i + 1]]` long (one in each row, if lists hold numbers).
    """

    flat: np.ndarray
    bounds: np.ndarray  # [n + 1]
    outer: np.ndarray  # [n + 1]
    widths: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)

    def each(self, holds: Callable[[np.ndarray], Any]) -> np.ndarray:
        """bool [n]: whether `holds` is true of a row's values. It must hold for all if it holds for each."""
        if holds(self.flat):
            return np.ones(len(self.bounds) - 1, bool)
        return np.array(
            [bool(holds(self.flat[a:b])) for a, b in pairwise(self.bounds.tolist())], bool
        )

    def same(self, other: Numbers) -> np.ndarray:
        """bool [n]: equal values in equal shapes."""
        return _same_slices(self.flat, self.bounds, other.flat, other.bounds) & _same_slices(
            self.widths, self.outer, other.widths, other.outer
        )


@dataclass
class Items:
    """The records of a column, by field: None where a record lacks it. Rows that are not `good` have none here."""

    good: np.ndarray  # [n]
    row: np.ndarray  # [m]
    fields: dict[str, Sequence[Any]]

    @property
    def counts(self) -> np.ndarray:
        """int64 [n]."""
        return np.bincount(self.row, minlength=len(self.good))

    def field(self, name: str) -> Sequence[Any]:
        return self.fields.get(name) or [None] * len(self.row)

    def has(self, name: str) -> np.ndarray:
        """bool [m]."""
        if name in self.fields and None not in self.fields[name]:
            return np.ones(len(self.row), bool)
        return np.array([v is not None for v in self.field(name)], bool)

    def ints(self, name: str, missing: int = -1) -> np.ndarray:
        """int64 [m]."""
        return np.array([missing if v is None else v for v in self.field(name)], np.int64)

    def rows_where(self, name: str, holds: Callable[[Any], Any]) -> np.ndarray:
        """The rows of records whose field is there, and such."""
        if name not in self.fields:
            return self.row[:0]
        return self.row[[v is not None and bool(holds(v)) for v in self.fields[name]]]


def sound(rows: Rows, max_record_bytes: int) -> np.ndarray:
    """bool [n]: rows that `Sample.read` takes as they are (padding is not cut off) and that break no rule."""
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
        return _each_fits(spec, rows.values(name))

    return check


def fits(spec: Spec, values: Sequence[Any]) -> bool:
    """Whether `spec.read` surely takes each of `values`, parsed JSON without nulls, as it is."""
    kinds = set(map(type, values))
    match spec:
        case Str():
            if not kinds <= {str} or (spec.choices and not set(values) <= set(spec.choices)):
                return False
            return not spec.pattern or all(re.search(spec.pattern, v) for v in set(values))
        case Int():
            if not values or not kinds <= {int}:
                return not values
            return spec.low <= min(values) and max(values) <= spec.high
        case Float():
            whole = [v for v in values if type(v) is int]
            return (
                kinds <= {int, float}
                and fits(Int(-INT_MAX, INT_MAX), whole)
                and all(map(math.isfinite, values))
            )
        case Ints() | Floats():
            item = Int(spec.low, spec.high) if isinstance(spec, Ints) else Float()
            if not kinds <= {list} or (
                spec.length is not None and not set(map(len, values)) <= {spec.length}
            ):
                return False
            return fits(item, list(chain.from_iterable(values)))
        case Array(dtype="int64", rows=None, low=int(), high=int()):
            return kinds <= {list} and fits(
                Int(spec.low or 0, spec.high or 0), list(chain.from_iterable(values))
            )
        case Json():
            return kinds <= {dict} and all(json_fault(v) is None for v in values)
        case ScopeSpec():
            named = [v for v in values if v != "sequence"]  # of a turn or a region, not of a span
            return all(
                type(v) is dict
                and len(v) == 1
                and v.keys() <= {"turn", "region"}
                and fits(Int(), list(v.values()))
                for v in named
            )
    return False


def _each_fits(spec: Spec, values: Sequence[Any]) -> np.ndarray:
    """bool [n]: whether a value fits or is None."""
    if fits(spec, [v for v in values if v is not None] if None in values else values):
        return np.ones(len(values), bool)
    return np.array([v is None or fits(spec, [v]) for v in values], bool)


def _is_plain(kind: Any) -> bool:
    """A column of no field, whose values any sample can carry in `metadata`."""
    types = _pyarrow().types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)


def _in_range(flat: np.ndarray) -> bool:
    """Integers in [0, INT_MAX]."""
    if flat.dtype == np.int64:
        return not flat.size or flat.view(np.uint64).max() <= INT_MAX  # negative ones are huge
    if flat.size and flat.dtype.kind in "iu":
        return bool(flat.min() >= 0 and flat.max() <= INT_MAX)
    return not flat.size


def _numbers(column: Any, depth: int) -> Numbers | None:
    types = _pyarrow().types
    levels = []
    for level in range(depth):
        if not (types.is_list(column.type) or types.is_large_list(column.type)):
            return None
        if level and column.null_count:
            return None
        bounds = column.offsets.to_numpy(zero_copy_only=True)
        start, stop = int(bounds[0]), int(bounds[-1])
        levels.append(bounds - start)
        column = column.values.slice(start, stop - start)
    kind = column.type
    if column.null_count or not (types.is_integer(kind) or types.is_floating(kind)):
        return None
    flat, widths = column.to_numpy(zero_copy_only=True), np.diff(levels[-1])
    if depth == 1:
        return Numbers(flat, levels[0], np.arange(len(widths) + 1), widths)
    return Numbers(flat, levels[1][levels[0]], levels[0], widths)


def _same_slices(a: np.ndarray, at: np.ndarray, b: np.ndarray, bt: np.ndarray) -> np.ndarray:
    """bool [n]: whether `a[at[i]:at[i + 1]]` equals `b[bt[i]:bt[i + 1]]`."""
    if np.array_equal(at, bt) and np.array_equal(a, b):
        return np.ones(len(at) - 1, bool)
    both = zip(pairwise(at.tolist()), pairwise(bt.tolist()), strict=True)
    return np.array([np.array_equal(a[i:j], b[k:m]) for (i, j), (k, m) in both], bool)


def _parsed(text: Any) -> Any:
    """The JSON of a text; DOUBTED for what is none, or may have a key twice in one object."""
    if not isinstance(text, str):
        return DOUBTED
    try:
        value, stop = _DECODER.raw_decode(text)
        if text.count(":") != _keys(value):  # else a colon for each key: none came twice
            value, stop = _PAIRS_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return DOUBTED
    return value if stop == len(text) else DOUBTED


def _keys(value: Any) -> int:
    """Keys of an object, or of the objects in a list; not those further in."""
    if type(value) is dict:
        return len(value)
    return sum(map(len, value)) if type(value) is list and set(map(type, value)) == {dict} else 0


def _object(pairs: list[tuple[str, Any]]) -> Any:
    out = dict(pairs)
    return out if len(out) == len(pairs) else DOUBTED


_DECODER, _PAIRS_DECODER = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_object)


def _objects(texts: list[Any]) -> list[Any]:
    seen: dict[Any, Any] = {None: None}
    for text in texts:
        if not isinstance(text, str | None):
            return [DOUBTED] * len(texts)
        if text not in seen:
            value = _parsed(text)
            seen[text] = value if fits(Json(), [value]) else DOUBTED
    return [seen[text] for text in texts]


def _items(texts: list[Any], cls: type[Record]) -> Items:
    lists = [[] if text is None else _parsed(text) for text in texts]
    good = np.array([type(v) is list and set(map(type, v)) <= {dict} for v in lists], bool)
    lists = [v if ok else [] for v, ok in zip(lists, good.tolist(), strict=True)]
    row = np.repeat(np.arange(len(texts)), [len(v) for v in lists])
    fields = _fields(list(chain.from_iterable(lists)))
    misfits = _misfits(fields, len(row), cls)
    if not misfits.any():
        return Items(good, row, fields)
    good[row[misfits]] = False
    kept = np.flatnonzero(good[row])
    return Items(good, row[kept], {n: [v[i] for i in kept.tolist()] for n, v in fields.items()})


def _fields(items: list[dict[str, Any]]) -> dict[str, Sequence[Any]]:
    """The items by key."""
    layouts = set(map(tuple, items))
    if len(layouts) == 1:
        values = zip(*[item.values() for item in items], strict=True)
        return dict(zip(*layouts, values, strict=True))
    names = dict.fromkeys(chain.from_iterable(layouts))
    return {name: [item.get(name) for item in items] for name in names}


def _misfits(fields: dict[str, Sequence[Any]], count: int, cls: type[Record]) -> np.ndarray:
    """bool [m]: items that don't surely fit."""
    wrong = np.zeros(count, bool)
    if not count:
        return wrong
    columns = cls.columns()
    for name, values in fields.items():
        if name in columns:
            wrong |= ~_each_fits(columns[name].spec, values)
        else:
            wrong |= [v is not None for v in values]
    for name, declared in columns.items():
        if declared.required:
            wrong |= [v is None for v in fields[name]] if name in fields else True
    return wrong


# ---- rules ---------------------------------------------------------------------------------------


def _layout(rows: Rows) -> np.ndarray:
    """Media, modality spans and loss spans over the ids: MM1xx, MM201 to MM203."""
    family, ids = rows.family, rows.numbers("input_ids")
    media, spans, loss = (rows.items(n) for n in ("media", "modality_spans", "loss_spans"))
    if ids is None:
        return np.zeros(rows.rows, bool)
    ok = media.good & spans.good & loss.good
    grids = np.array(media.field("grid_thw"), np.float64).reshape(-1, 3)  # products can't overflow
    tokens = _vision_tokens(family, grids)
    ok[media.row[tokens != media.ints("num_tokens")]] = False
    ok[_wrong_times(media, family, grids)] = False
    _refuse_twice(ok, media)
    lengths = ids.lengths

    row, start, stop = spans.row, spans.ints("start"), spans.ints("stop")
    index = spans.ints("media_index")
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
    framed = (code == MODALITY_BITS["video"]) & (family.video_layout == "frames")
    ok[row[~framed & (stop - start != tokens[medium])]] = False
    frame = spans.ints("frame")[kept]
    patches = np.maximum(grids[:, 0], 1).astype(np.int64)
    unlike = _wrong_frames(frame[framed], medium[framed], (stop - start)[framed], patches, tokens)
    ok[media.row[unlike]] = False

    found = np.zeros(len(ids.flat), np.uint8)
    for modality, token in family.placeholder_ids.items():
        found |= (ids.flat == token).view(np.uint8) * np.uint8(MODALITY_BITS[modality])
    said = np.zeros(len(ids.flat), np.uint8)
    first = ids.bounds[:-1].astype(np.int64)
    starts, stops = first[row] + start, first[row] + stop
    for a, b, bit in zip(starts.tolist(), stops.tolist(), code.tolist(), strict=True):
        said[a:b] = bit
    ok &= _same_slices(found, ids.bounds, said, ids.bounds)

    row, start, stop = loss.row, loss.ints("start"), loss.ints("stop")
    ok[row[(start < _before(row, stop)) | (start > stop) | (stop > lengths[row])]] = False
    ok[row[(start == 0) | _overlaps(first[row] + start, first[row] + stop, starts, stops)]] = False
    return ok


def _bits(items: Items) -> np.ndarray:
    """uint8 [m]: of the modality."""
    return np.array([MODALITY_BITS[name] for name in items.field("modality")], np.uint8)


def _vision_tokens(family: Family, grids: np.ndarray) -> np.ndarray:
    """float64 [m]: tokens of each grid; -2, as no medium has, of a grid that breaks MM102."""
    t, h, w = grids.T
    merge = family.spatial_merge_size
    bad = (grids == 0).any(axis=1) | (h % merge != 0) | (w % merge != 0)
    return np.where(bad, -2, family.vision_tokens((t, h, w)))  # type: ignore[arg-type]


def _wrong_times(media: Items, family: Family, grids: np.ndarray) -> np.ndarray:
    """Rows that break MM112, and MM111 by the number of frames."""
    negative = [media.rows_where(name, lambda v: v < 0) for name in ("fps", "second_per_grid_ts")]
    frames = np.array([-1 if v is None else len(v) for v in media.field("frame_indices")], np.int64)
    sampled = (frames >= 0) & (_bits(media) == MODALITY_BITS["video"])
    unlike = sampled & (-(-frames // family.temporal_patch_size) != grids[:, 0])
    return np.concatenate([*negative, media.row[unlike]])


def _refuse_twice(ok: np.ndarray, media: Items) -> None:
    """Rows with a cache key twice (whether of one content, MM109 says)."""
    keys = media.field("cache_key")
    if len(set(keys)) == len(keys):
        return
    seen = set()
    for place in zip(media.row.tolist(), keys, strict=True):
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
    """Shapes against the ids, values against their rules. A mask with a zero is left to `Sample.read`."""
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
        scored = np.bincount(loss.row, loss.ints("stop") - loss.ints("start"), rows.rows)
        ok &= (logprobs.lengths == scored) | ~rows.present("rollout_logprobs")
        ok &= logprobs.each(_are_logprobs)
    cached = rows.values("prefix_cached_tokens")
    return ok & [(v or 0) <= n for v, n in zip(cached, lengths.tolist(), strict=True)]


def _are_logprobs(flat: np.ndarray) -> bool:
    return not flat.size or bool(
        np.finfo(np.float32).min <= flat.min() and flat.max().astype(np.float32) <= 1e-4
    )  # NaN is in no range


def _other_spans(rows: Rows) -> np.ndarray:
    """MM106, MM204 to MM206, MM303, MM308."""
    ok = np.ones(rows.rows, bool)
    ids = rows.numbers("input_ids")
    assert ids is not None
    lengths, first = ids.lengths, ids.bounds[:-1].astype(np.int64)
    for name in ("observation_spans", "action_spans", "region_spans", "policy_versions"):
        if name not in rows.columns:
            continue
        spans = rows.items(name)
        row, start, stop = spans.row, spans.ints("start"), spans.ints("stop")
        ok[row[(start > stop) | (stop > lengths[row])]] = False
        if name in ("observation_spans", "policy_versions"):
            ok[row[start < _before(row, stop)]] = False
        if name == "observation_spans":
            loss, kept = rows.items("loss_spans"), ok[row] & (start < stop)
            at = first[loss.row]
            begin, end = at + loss.ints("start"), at + loss.ints("stop")
            shift = first[row[kept]]
            hit = _overlaps(begin, end, shift + start[kept], shift + stop[kept])
            ok[loss.row[hit]] = False
    placed = np.zeros(rows.rows, bool)
    counts = rows.items("media").counts
    for name in ("region_spans", "bbox_targets", "point_targets"):
        if name not in rows.columns:
            continue
        places = rows.items(name)
        ok[places.row[places.ints("media_index") >= counts[places.row]]] = False
        for field in ("bbox", "point"):
            placed[places.rows_where(field, lambda _: True)] = True
    return ok & ~(placed & ~rows.present("coordinate_system"))


def _scores(rows: Rows) -> np.ndarray:
    """MM304 and MM305. What is paid for less than the whole sequence is left to them."""
    ok = np.ones(rows.rows, bool)
    loss = rows.items("loss_spans")
    empty = np.bincount(loss.row, loss.ints("stop") - loss.ints("start"), rows.rows) == 0
    for name in ("rewards", "costs"):
        if name in rows.columns:
            scores = rows.items(name)
            ok[scores.rows_where("scope", lambda scope: scope != "sequence")] = False
            paid = scores.rows_where("value", lambda value: value != 0)
            ok[paid[empty[paid]]] = False
    return ok


def _pyarrow() -> ModuleType:
    return require("pyarrow", "parquet", "read_trace of a .parquet file")


def take(columns: dict[str, Any], rows: Iterable[int]) -> dict[str, Any]:
    """Those rows of each column."""
    index = np.fromiter(rows, np.int64)
    return {name: column.take(_pyarrow().array(index)) for name, column in columns.items()}
