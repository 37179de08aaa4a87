"""Two Parquet traces compared by columns: pairs that are surely equal are counted, only the others become samples.

Rows come in windows, the next n of both files. What a window holds comes as `Alike`, pairs that are equal and break no
rule, and as steps, the samples of all other rows, in the order in which reading both files one by one gives them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from mmpack.families import FAMILIES
from mmpack.parity.causes.settings import compare_settings
from mmpack.parity.columnar.items import Items
from mmpack.parity.columnar.rules import sound
from mmpack.parity.columnar.table import Rows, parsed_lists, take
from mmpack.parity.columnar.texts import DOUBTED
from mmpack.parity.fields import MEDIA_FIELDS, VIDEO_FIELDS
from mmpack.parity.records import MEDIA_NOTES, RECORDS
from mmpack.parity.sampling import lacking_sampling, unlike_sampling, who_lacks
from mmpack.parity.values import same_value
from mmpack.schema.fields import Array, keep_unknown
from mmpack.schema.parquet import Block
from mmpack.schema.sample import Sample
from mmpack.schema.trace import Ids, TraceReader, repeated_id

Lacks = frozenset[tuple[str, str]]  # what `fields.lacking` gives
Numbered = tuple[int, Sample]  # with its number in the trace, from 0
Step = tuple[Numbered | None, Numbered | None]
ARRAYS = [name for name, c in Sample.columns().items() if isinstance(c.spec, Array)]
SPAN = ("start", "stop", "modality", "media_index", "frame")
MEDIUM = ("cache_key", "grid_thw", "modality", "num_tokens")
BLOCKS_AHEAD = 2
LOSS_SPAN = ("start", "stop", "kind")


@dataclass(frozen=True)
class Alike:
    """`count` pairs, one after the other, that lack the same."""

    count: int
    lacks: Lacks


def steps(rollout: TraceReader, train: TraceReader, scored: int) -> Iterator[Alike | Step]:
    """All that two Parquet traces hold; the first `scored` pairs with logprobs come as samples anyway.

    Raises TraceError.
    """
    # Rows are compared while those that follow are parsed, and others decoded.
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(count)) for count in (1, 1, 2)]
        left_side = _Side(rollout.blocks(), rollout.max_record_bytes, threads[0], threads[2])
        right_blocks = train.blocks(rollout)
        right_side = _Side(right_blocks, train.max_record_bytes, threads[1], threads[2])
        sides = left_side, right_side
        while rows := [side.rows_left() for side in sides if side.rows_left()]:
            left = sides[0].next(min(rows))
            right = sides[1].next(min(rows), left.block)
            alike = _alike(left, right)
            with_logprobs = {lacks for lacks in set(alike.values()) if _has_logprobs(lacks)}
            if scored and with_logprobs:
                kept = [pair for pair, lacks in alike.items() if lacks in with_logprobs]
                kept = sorted(kept, key=_arrival)[:scored]
                scored -= len(kept)
                alike = {pair: lacks for pair, lacks in alike.items() if pair not in kept}
            yield from _merged(_events(left, right, alike))


class _Side:
    """One file, read some blocks ahead."""

    def __init__(
        self, blocks: Iterator[Block], max_record_bytes: int, reading: Executor, parsing: Executor
    ) -> None:
        self.blocks, self.max_record_bytes = blocks, max_record_bytes
        self.reading, self.parsing = reading, parsing  # `reading`: one thread, blocks come in order
        self.coming: deque[Future[Block | None]] = deque()
        for _ in range(BLOCKS_AHEAD):
            self._read_on()
        self.block: Block | None = None
        self.at = 0
        self.seen = Ids()

    def _read_on(self) -> None:
        read = self.reading.submit(next, self.blocks, None)
        self.coming.append(self.parsing.submit(_parsed, read))

    def rows_left(self) -> int:
        """Rows of the block that is being read; 0 at the end of the file."""
        if self.block is None or self.at == self.block.rows:
            self._read_on()
            self.block, self.at = self.coming.popleft().result(), 0
        return 0 if self.block is None else self.block.rows - self.at

    def next(self, rows: int, other: Block | None = None) -> _Part:
        """The next rows; none at the end of the file. `other`: those of the other file."""
        if self.block is None:
            return _Part(None, [], set(), self.max_record_bytes)
        block = self.block.slice(self.at, self.at + rows).filled(other)
        self.at += rows
        ids = block.values("sample_id")
        named = [(k, name) for k, name in enumerate(ids) if type(name) is str]
        repeated = {k for k, name in named if not self.seen.is_new(name)}
        return _Part(block, ids, repeated, self.max_record_bytes)


def _parsed(read: Future[Block | None]) -> Block | None:
    """A block, its columns of records parsed as far as Arrow can."""
    block = read.result()
    return block and replace(block, lists=parsed_lists(block.columns))


@dataclass
class _Part:
    """Rows of one file, and which of them have an id that came before."""

    block: Block | None
    ids: list[Any]
    repeated: set[int]
    max_record_bytes: int

    def places(self) -> dict[str, int]:
        """The row of each id."""
        ids = enumerate(self.ids)
        return {name: k for k, name in ids if type(name) is str and k not in self.repeated}

    def take(self, rows: list[int], family: str) -> Rows:
        assert self.block is not None
        columns, lists = self.block.columns, self.block.lists
        if rows != [*range(len(self.ids))]:
            columns, lists = take(columns, rows), take(lists, rows)
        return Rows(columns, lists, len(rows), FAMILIES[family])

    def samples(self, but: set[int]) -> Iterator[Numbered]:
        """The samples of all rows but some."""
        rows = [k for k in range(len(self.ids)) if k not in but]
        for _, together in groupby(enumerate(rows), lambda item: item[1] - item[0]):
            run = [k for _, k in together]
            assert self.block is not None
            block = self.block.slice(run[0], run[-1] + 1)
            for k, (number, record) in zip(run, block.records(), strict=True):
                where = f"{block.path}: record {number}"
                sample = Sample.from_dict(record, where)
                if k in self.repeated:
                    raise repeated_id(sample.sample_id, where)
                yield number - 1, sample


def _arrival(pair: tuple[int, int]) -> tuple[int, bool]:
    """When the second row of a pair comes: at a row, the left one first."""
    return max(pair), pair[0] < pair[1]


def _has_logprobs(lacks: Lacks) -> bool:
    return not any(name == "rollout_logprobs" and who in ("rollout", "both") for name, who in lacks)


def _merged(events: Iterator[Lacks | Step]) -> Iterator[Alike | Step]:
    """Equal pairs that lack the same, one after the other, as one."""
    for lacks, together in groupby(events, lambda e: e if isinstance(e, frozenset) else None):
        if isinstance(lacks, frozenset):
            yield Alike(sum(1 for _ in together), lacks)
        else:
            yield from (event for event in together if isinstance(event, tuple))


def _events(
    left: _Part, right: _Part, alike: dict[tuple[int, int], Lacks]
) -> Iterator[Lacks | Step]:
    """What comes with each row k: its samples, and an equal pair with the second of its rows."""
    if len(alike) == len(left.ids) == len(right.ids) and all(i == j for i, j in alike):
        yield from (alike[k, k] for k in range(len(alike)))
        return
    equal = [{i for i, _ in alike}, {j for _, j in alike}]
    came = {_arrival(pair): lacks for pair, lacks in alike.items()}
    lefts, rights = left.samples(equal[0]), right.samples(equal[1])
    for k in range(max(len(left.ids), len(right.ids))):
        if (k, False) in came:
            yield came[k, False]
        a = next(lefts) if k < len(left.ids) and k not in equal[0] else None
        b = next(rights) if k < len(right.ids) and k not in equal[1] else None
        if a is not None or b is not None:
            yield a, b
        if (k, True) in came:
            yield came[k, True]


def _alike(left: _Part, right: _Part) -> dict[tuple[int, int], Lacks]:
    """The pairs (left row, right row) of one id that are equal and break no rule, with what they lack."""
    there = right.places()
    pairs = [(i, there[name]) for name, i in left.places().items() if name in there]
    if not pairs:
        return {}
    assert left.block is not None and right.block is not None
    families = left.block.values("family"), right.block.values("family")
    out: dict[tuple[int, int], Lacks] = {}
    for family in FAMILIES:
        of = [(i, j) for i, j in pairs if families[0][i] == family == families[1][j]]
        if of:
            rows = left.take([i for i, _ in of], family), right.take([j for _, j in of], family)
            found = _compared(*rows, left.max_record_bytes, right.max_record_bytes)
            out |= {pair: lacks for pair, lacks in zip(of, found, strict=True) if lacks is not None}
    return out


# ---- rows that are paired already ----------------------------------------------------------------


def _compared(left: Rows, right: Rows, *max_record_bytes: int) -> list[Lacks | None]:
    """What each pair lacks; None for a pair that may differ or break a rule."""
    right.adopt(left)
    ok = sound(left, min(max_record_bytes))
    if ok.any():
        ok &= _same_layout(left, right)
    if (ok & ~_identical(left, right)).any():
        ok &= sound(right, max_record_bytes[1])
    if not ok.any():
        return [None] * left.rows
    parts = _lacking(left, right, ok), _settings(left, right), _sampling(left, right)
    seen: dict[tuple[Lacks | None, ...], Lacks | None] = {}
    out = []
    for good, *lacks in zip(ok.tolist(), *parts, strict=True):
        key = tuple(lacks) if good else (None,)
        if key not in seen:
            seen[key] = None if None in key else frozenset().union(*key)  # type: ignore[arg-type]
        out.append(seen[key])
    return out


def _identical(left: Rows, right: Rows) -> np.ndarray:
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


def _same_layout(left: Rows, right: Rows) -> np.ndarray:
    """bool [n]: equal in what both recorded, but settings. Masks are equal if both have no holes: see `sound`."""
    same = _same_items(left, right, "modality_spans", SPAN)
    same &= _same_items(left, right, "media", MEDIUM, MEDIA_FIELDS + VIDEO_FIELDS)
    same &= _same_items(left, right, "loss_spans", LOSS_SPAN, ("turn",))
    same &= _same_numbers(left, right, "input_ids")
    both = left.present("position_ids") & right.present("position_ids")
    if both.any():
        same &= _same_numbers(left, right, "position_ids") | ~both
    for name in RECORDS:
        both = left.present(name) & right.present(name)
        if name not in right.shared and both.any():
            same &= ~both | _same_values(left, right, name)
    return same


def _same_numbers(left: Rows, right: Rows, name: str) -> np.ndarray:
    if name in right.shared:
        return np.ones(right.rows, bool)
    a, b = left.numbers(name), right.numbers(name)
    return np.zeros(right.rows, bool) if a is None or b is None else a.same(b)


def _of_kind(rows: Rows, name: str) -> bool:
    """Whether an array is of integers where it has to be: 1.0 equals 1, and `Sample.from_dict` refuses it."""
    spec, numbers = Sample.columns()[name].spec, rows.numbers(name)
    whole = isinstance(spec, Array) and spec.dtype.startswith("int")
    return not whole or (numbers is not None and numbers.flat.dtype.kind in "iu")


def _same_values(left: Rows, right: Rows, name: str) -> list[bool]:
    """Equal texts, or equal scalars of one type."""
    one_type = left.columns[name].type == right.columns[name].type
    both = zip(left.values(name), right.values(name), strict=True)
    return [a == b and (one_type or isinstance(a, str | None)) for a, b in both]


def _same_items(
    left: Rows, right: Rows, name: str, fields: Sequence[str], if_both: Sequence[str] = ()
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


# ---- what a pair lacks: `fields.lacking`, by columns ----------------------------------------------


def _lacking(left: Rows, right: Rows, ok: np.ndarray) -> list[Lacks]:
    """Of all but settings and sampling, of the rows that are `ok`."""
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
    for name in ("position_ids", "attention_mask", "rollout_logprobs", *RECORDS):
        lack(name, rows, _recorded(left, name), _recorded(right, name))
    a, b = left.items("media"), right.items("media")
    mine, theirs = (np.flatnonzero(ok[side.row]) for side in (a, b))
    row = a.row[mine]
    video = a.codes("modality", ["video"])[mine] == 0
    for name in MEDIA_FIELDS + (VIDEO_FIELDS if video.any() else ()):
        left_has, right_has = a.has(name)[mine], b.has(name)[theirs]
        if name in VIDEO_FIELDS:
            left_has, right_has = left_has | ~video, right_has | ~video
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


def _recorded(rows: Rows, name: str) -> np.ndarray:
    """bool [n]: see `records.recorded`."""
    if name != "group_id":
        return rows.present(name)
    return np.array([bool(value) for value in rows.values(name)], bool)


def _other_notes(a: Items, b: Items, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """bool [k]: records whose `metadata` differ; none is as good as an empty one."""
    notes = a.values("metadata"), b.values("metadata")
    return _unlike((notes[0][i] for i in mine.tolist()), (notes[1][j] for j in theirs.tolist()))


def _unlike(a: Iterable[Any], b: Iterable[Any]) -> np.ndarray:
    """bool [n]: other values; none is as good as 0 or an empty one."""
    return np.array([not same_value(x or None, y or None) for x, y in zip(a, b, strict=True)], bool)


def _metadata(rows: Rows) -> list[Any]:
    """As `Sample.read` makes it: columns of no field join it."""
    notes = rows.objects("metadata")
    names = [name for name in rows.columns if name not in Sample.columns()]
    if not names:
        return notes
    values = zip(*(rows.values(name) for name in names), strict=True)
    found = [{k: v for k, v in zip(names, row, strict=True) if v is not None} for row in values]
    return [
        keep_unknown({} if own is DOUBTED else own or {}, more)
        for own, more in zip(notes, found, strict=True)
    ]


def _settings(left: Rows, right: Rows) -> list[Lacks | None]:
    """Of `processor`; None where settings differ."""
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
    if DOUBTED in (a, b) or {} in (a, b):
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


def _sampling(left: Rows, right: Rows) -> list[Lacks | None]:
    """Of `sampling` and the logprobs that it speaks of; None where they are of unlike kinds."""
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
    if DOUBTED in (a, b) or (both and unlike_sampling(a, b)):
        return None
    lacks = frozenset(lacking_sampling(a, b, both))
    return lacks | {("rollout_logprobs", "never")} if both else lacks
