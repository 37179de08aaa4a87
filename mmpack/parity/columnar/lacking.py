"""What pairs of equal rows lack on one side or both: `fields.lacking`, by columns. n pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mmpack.parity.causes.alike import OF_MODALITY
from mmpack.parity.causes.settings import compare_settings
from mmpack.parity.records import MEDIA_NOTES, RECORDS
from mmpack.parity.replay import REPLAYED
from mmpack.parity.sampling import lacking_sampling, unlike_sampling, who_lacks
from mmpack.parity.values import same_value
from mmpack.schema.columns.items import Items
from mmpack.schema.columns.table import UNREADABLE, Table
from mmpack.schema.fields import keep_unknown
from mmpack.schema.sample import Sample
from mmpack.schema.spans import MODALITIES

Lacks = frozenset[tuple[str, str]]  # what `fields.lacking` yields


def lacking_layout(left: Table, right: Table, ok: np.ndarray) -> list[Lacks]:
    """Per pair, of all fields except settings and sampling; of the rows that are `ok` [n]."""
    found: list[tuple[str, str]] = []
    marks: list[np.ndarray] = []  # bool [n] for each of `found`

    def note(name: str, who: str, row: np.ndarray, where: np.ndarray) -> None:
        if where.any():
            found.append((name, who))
            marks.append(np.zeros(left.rows, bool))
            marks[-1][row[where]] = True

    def lack(name: str, row: np.ndarray, has: np.ndarray, other_has: np.ndarray) -> None:
        note(name, "both", row, ~has & ~other_has)
        note(name, "rollout", row, ~has & other_has)
        note(name, "train", row, has & ~other_has)

    rows = np.arange(left.rows)
    extra = (left.columns.keys() | right.columns.keys()) - Sample.columns().keys()
    for name in ("position_ids", "attention_mask", "rollout_logprobs", *RECORDS, *REPLAYED):
        lack(name, rows, _recorded(left, name), _recorded(right, name))
    a, b = left.items("media"), right.items("media")
    mine, theirs = (np.flatnonzero(ok[side.row]) for side in (a, b))
    row = a.row[mine]
    kinds = a.codes("modality", MODALITIES)[mine]
    read = {"content_hash": ("image", "video", "audio"), "size": ("image", "video")}
    read |= {name: (kind,) for kind, names in OF_MODALITY.items() for name in names}
    for name, of in read.items():
        others = ~np.isin(kinds, [MODALITIES.index(kind) for kind in of])
        if not others.all():
            left_has, right_has = a.has(name)[mine] | others, b.has(name)[theirs] | others
            lack(f"media.{name}", row, left_has, right_has)
    if "media" not in right.shared:
        for name in MEDIA_NOTES:
            note(f"media.{name}", "note", row, ~a.same(b, mine, theirs, name))
        note("media.metadata", "note", row, _other_notes(a, b, mine, theirs))
    for name in ("modality_spans", "loss_spans"):
        if name in right.shared:
            continue
        a, b = left.items(name), right.items(name)
        mine, theirs = (np.flatnonzero(ok[side.row]) for side in (a, b))
        row = a.row[mine]
        note(f"{name}.metadata", "note", row, _other_notes(a, b, mine, theirs))
        if name == "loss_spans":
            empty = (a.numbers("start") == a.numbers("stop"))[mine]
            turns = a.has("turn")[mine], b.has("turn")[theirs]
            note("loss_spans.turn", "rollout", row, ~turns[0] & turns[1] & ~empty)
            note("loss_spans.turn", "train", row, turns[0] & ~turns[1] & ~empty)
    counts = (side.values("prefix_cached_tokens") for side in (left, right))
    note("prefix_cached_tokens", "note", rows, ok & _unlike(*counts))
    if extra or "metadata" not in right.shared:
        note("metadata", "note", rows, ok & _unlike(_metadata(left), _metadata(right)))
    if not marks:
        return [frozenset()] * left.rows
    bits = np.packbits(np.stack(marks, axis=1), axis=1)
    made: dict[bytes, Lacks] = {}
    out = []
    for key in map(bytes, bits):
        if key not in made:
            kept = np.unpackbits(np.frombuffer(key, np.uint8), count=len(found))
            made[key] = frozenset(item for item, bit in zip(found, kept, strict=True) if bit)
        out.append(made[key])
    return out


def _recorded(table: Table, name: str) -> np.ndarray:
    """bool [n]: see `records.recorded`."""
    if name != "group_id":
        return table.present(name)
    return np.array([bool(value) for value in table.values(name)], bool)


def _other_notes(a: Items, b: Items, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """bool [k]: records whose `metadata` differ; None equals an empty one."""
    notes = a.values("metadata"), b.values("metadata")
    return _unlike((notes[0][i] for i in mine.tolist()), (notes[1][j] for j in theirs.tolist()))


def _unlike(a: Iterable[Any], b: Iterable[Any]) -> np.ndarray:
    """bool [n]: whether values differ; None equals 0 or an empty one."""
    return np.array([not same_value(x or None, y or None) for x, y in zip(a, b, strict=True)], bool)


def _metadata(table: Table) -> list[Any]:
    """As `Sample.from_dict` reads it: columns that are no field join it."""
    notes = table.objects("metadata")
    names = [name for name in table.columns if name not in Sample.columns()]
    if not names:
        return notes
    values = zip(*(table.values(name) for name in names), strict=True)
    found = [{k: v for k, v in zip(names, row, strict=True) if v is not None} for row in values]
    return [
        keep_unknown({} if own is UNREADABLE else own or {}, more)
        for own, more in zip(notes, found, strict=True)
    ]


def lacking_settings(left: Table, right: Table) -> list[Lacks | None]:
    """Per pair, of `processor`; None where settings differ."""
    seen: dict[Any, Lacks | None] = {}
    columns = [side.objects("processor") for side in (left, right)]
    columns += [side.values("processor_fingerprint") for side in (left, right)]
    out = []
    for a, b, mark, other in zip(*columns, strict=True):
        key = id(a), id(b), mark, other
        if key not in seen:
            seen[key] = _lacking_settings(a, b, mark, other)
        out.append(seen[key])
    return out


def _lacking_settings(a: Any, b: Any, mark: Any, other: Any) -> Lacks | None:
    if UNREADABLE in (a, b) or {} in (a, b):
        return None
    if a is not None and b is not None:
        if a == b and None not in (mark, other) and mark != other:
            return None
        unlike, lacks = compare_settings(a, b) if a != b else ({}, {})
        found = frozenset((f"processor.{path}", who) for path, who in lacks.items())
        return None if unlike else found
    if mark is None or other is None:
        return frozenset({("processor", who_lacks(a or mark, b or other))})
    return frozenset() if mark == other else None


def lacking_sampling_by(left: Table, right: Table) -> list[Lacks | None]:
    """Per pair, of `sampling` and its logprobs; None where they are of different kinds."""
    scored = left.present("rollout_logprobs") & right.present("rollout_logprobs")
    seen: dict[Any, Lacks | None] = {}
    out = []
    for both, a, b in zip(
        scored.tolist(), left.objects("sampling"), right.objects("sampling"), strict=True
    ):
        key = both, id(a), id(b)
        if key not in seen:
            seen[key] = _lacking_sampling(both, a, b)
        out.append(seen[key])
    return out


def _lacking_sampling(both: bool, a: Any, b: Any) -> Lacks | None:
    if UNREADABLE in (a, b) or (both and unlike_sampling(a, b)):
        return None
    lacks = frozenset(lacking_sampling(a, b, both))
    return lacks | {("rollout_logprobs", "never")} if both else lacks
