"""Rows of two tables that are paired already: which pairs are surely equal, and break no rule. n pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.parity.causes.alike import AUDIO_FIELDS, MEDIA_FIELDS, VIDEO_FIELDS
from mmpack.parity.columnar.lacking import (
    Lacks,
    lacking_layout,
    lacking_sampling_by,
    lacking_settings,
)
from mmpack.parity.fields import MODALITY_SPAN
from mmpack.parity.records import RECORDS
from mmpack.parity.replay import REPLAYED
from mmpack.schema.columns.table import Table
from mmpack.schema.ragged import RaggedSpec
from mmpack.schema.rules import surely_valid
from mmpack.schema.sample import Sample
from mmpack.schema.specs import Array

ARRAYS = [n for n, c in Sample.columns().items() if isinstance(c.spec, Array | RaggedSpec)]
LOSS_SPAN = ("start", "stop", "kind")
MEDIUM = ("cache_key", "grid_thw", "modality", "num_tokens")


def lacks_of_equal(left: Table, right: Table, *max_record_bytes: int) -> list[Lacks | None]:
    """What each pair lacks; None for a pair that may differ or break a rule.

    `max_record_bytes`: of the left and of the right trace.
    """
    right.share(left)
    ok = surely_valid(left, min(max_record_bytes))
    if ok.any():
        ok &= _same_layout(left, right)
    if (ok & ~_identical(left, right)).any():
        ok &= surely_valid(right, max_record_bytes[1])
    if not ok.any():
        return [None] * left.rows
    parts = (
        lacking_layout(left, right, ok),
        lacking_settings(left, right),
        lacking_sampling_by(left, right),
    )
    seen: dict[tuple[Lacks | None, ...], Lacks | None] = {}
    out = []
    for good, *lacks in zip(ok.tolist(), *parts, strict=True):
        key = tuple(lacks) if good else (None,)
        if key not in seen:
            seen[key] = None if None in key else frozenset().union(*key)  # type: ignore[arg-type]
        out.append(seen[key])
    return out


def _identical(left: Table, right: Table) -> np.ndarray:
    """bool [n]: nothing differs that a rule could read."""
    same = np.ones(right.rows, bool)
    for name in (left.columns.keys() | right.columns.keys()) - right.shared:
        if name not in Sample.columns():
            same &= ~right.present(name)
            continue
        if name in left.columns and name in right.columns and name not in ARRAYS:
            same &= _same_values(left, right, name)
        elif name in left.columns and name in right.columns:
            same &= _same_numbers(left, right, name) & _of_kind(right, name)
        same &= left.present(name) == right.present(name)
    return same


def _same_layout(left: Table, right: Table) -> np.ndarray:
    """bool [n]: equal in what both recorded, but settings. Valid masks are all ones: see `surely_valid`."""
    same = _same_items(left, right, "modality_spans", MODALITY_SPAN)
    same &= _same_items(left, right, "media", MEDIUM, MEDIA_FIELDS + VIDEO_FIELDS + AUDIO_FIELDS)
    same &= _same_items(left, right, "loss_spans", LOSS_SPAN, ("turn",))
    same &= _same_numbers(left, right, "input_ids")
    both = left.present("position_ids") & right.present("position_ids")
    if both.any():
        same &= _same_numbers(left, right, "position_ids") | ~both
    for name in RECORDS:
        both = left.present(name) & right.present(name)
        if name not in right.shared and both.any():
            same &= ~both | _same_values(left, right, name)
    for name in REPLAYED:  # of one side alone it is a difference
        has = left.present(name), right.present(name)
        same &= has[0] == has[1]
        if name not in right.shared and (has[0] & has[1]).any():
            equal = _same_numbers if name in ARRAYS else _same_values
            same &= ~has[0] | equal(left, right, name)
    return same


def _same_numbers(left: Table, right: Table, name: str) -> np.ndarray:
    if name in right.shared:
        return np.ones(right.rows, bool)
    a, b = left.numbers(name), right.numbers(name)
    return np.zeros(right.rows, bool) if a is None or b is None else a.same(b)


def _of_kind(table: Table, name: str) -> bool:
    """Whether an array is of integers where it has to be: 1.0 equals 1, and `Sample.from_dict` refuses it."""
    spec, numbers = Sample.columns()[name].spec, table.numbers(name)
    whole = isinstance(spec, RaggedSpec)
    whole |= isinstance(spec, Array) and spec.dtype.startswith("int")
    return not whole or (numbers is not None and numbers.flat.dtype.kind in "iu")


def _same_values(left: Table, right: Table, name: str) -> list[bool]:
    """Equal texts, or equal scalars of one type."""
    one_type = left.columns[name].type == right.columns[name].type
    both = zip(left.values(name), right.values(name), strict=True)
    return [a == b and (one_type or isinstance(a, str | None)) for a, b in both]


def _same_items(
    left: Table, right: Table, name: str, fields: Sequence[str], if_both: Sequence[str] = ()
) -> np.ndarray:
    """bool [n]: as many records, of equal `fields`, and of equal `if_both` where both have them."""
    if name in right.shared:
        return np.ones(right.rows, bool)
    a, b = left.items(name), right.items(name)
    ok = a.good & b.good & (a.counts == b.counts)
    row = a.row[ok[a.row]]
    mine, theirs = (np.flatnonzero(ok[side.row]) for side in (a, b))
    for field in (*fields, *if_both):
        same = a.same(b, mine, theirs, field)
        if field in if_both:
            same |= ~(a.has(field)[mine] & b.has(field)[theirs])
        ok[row[~same]] = False
    return ok
