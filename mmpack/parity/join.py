"""Two streams of samples, paired by sample_id in bounded memory; of two Parquet traces, what is equal is parsed once.

Streams in the same order run in lockstep. A sample whose partner has not come yet waits: the first WINDOW in memory,
the others in a temporary database on disk (`sqlite3.connect("")`: private, deleted when closed).
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.parity.across import MOST
from mmpack.schema.error_text import trace_error
from mmpack.schema.fields import same
from mmpack.schema.parquet import Block
from mmpack.schema.sample import Sample
from mmpack.schema.specs import Array
from mmpack.schema.trace import Ids, TraceReader, read_trace

WINDOW = 64
_CASTS = {"i": "iubf", "f": "f"}  # kinds of dtypes
Source = str | os.PathLike[str] | Iterable[Sample]


@dataclass(frozen=True)
class Matched:
    ordinal: int  # of the rollout's sample
    left: Sample
    right: Sample


@dataclass(frozen=True)
class Missing:
    ordinal: int
    sample_id: str
    side: str  # the side that lacks it
    sample: Sample | None  # None: there are too many


def paired(rollout: Source, train: Source) -> Iterator[Matched | Missing]:
    """Every pair as soon as both have come, then the samples without a partner. Raises TraceError (MM007)."""
    left_side, right_side = _Waiting("rollout"), _Waiting("train")
    matched: set[bytes] = set()  # 16 bytes per sample
    try:
        for left, right in _steps(rollout, train):
            if left and right and left[1].sample_id == right[1].sample_id:
                digest = _digest(left[1].sample_id)
                for side in (left_side, right_side):
                    side.refuse_duplicate(left[1].sample_id, digest in matched)
                matched.add(digest)
                yield Matched(left[0], left[1], right[1])
                continue
            for came, mine, others in (
                (left, left_side, right_side),
                (right, right_side, left_side),
            ):
                if came is None:
                    continue
                digest = _digest(came[1].sample_id)
                mine.refuse_duplicate(came[1].sample_id, digest in matched)
                partner = others.take(came[1].sample_id)
                if partner is None:
                    mine.put(*came)
                    continue
                matched.add(digest)
                first, second = (came, partner) if mine is left_side else (partner, came)
                yield Matched(first[0], first[1], second[1])
        for waiting, lacks in ((left_side, "train"), (right_side, "rollout")):
            for ordinal, sample_id, sample in waiting.rest():
                yield Missing(ordinal, sample_id, lacks, sample)
    finally:
        left_side.close()
        right_side.close()


def _steps(rollout: Source, train: Source) -> Iterator[Step]:
    sources: list[Any] = [
        read_trace(s) if isinstance(s, (str, os.PathLike)) else s for s in (rollout, train)
    ]
    left, right = sources
    if all(isinstance(source, TraceReader) and source.is_parquet for source in sources):
        return side_by_side(left, right)
    lefts, rights = enumerate(_samples(left, "rollout")), enumerate(_samples(right, "train"))
    return zip_longest(lefts, rights)


def _samples(source: Iterable[Sample], name: str) -> Iterator[Sample]:
    if isinstance(source, Sample):
        source = [source]
    if not isinstance(source, Iterable):
        raise ArgumentError(
            f"compare: {name} is {type(source).__name__}, expected samples or a path. "
            "Fix: pass samples, or the path of a trace"
        )
    for i, sample in enumerate(source):
        if not isinstance(sample, Sample):
            raise ArgumentError(
                f"compare: {name}[{i}] is a {type(sample).__name__}, expected a Sample. "
                "Fix: pass samples, or the path of a trace"
            )
        yield as_read(sample)


def as_read(sample: Sample) -> Sample:
    """The sample with arrays of the dtypes that a trace has, where that changes no value."""
    cast: dict[str, Any] = {}
    for name, declared in Sample.columns().items():
        array, spec = getattr(sample, name), declared.spec
        if isinstance(spec, Array) and isinstance(array, np.ndarray) and array.dtype != spec.dtype:
            to = np.dtype(spec.dtype)
            if array.dtype.kind in _CASTS[to.kind]:
                with np.errstate(over="ignore", invalid="ignore"):
                    made = array.astype(to)
                if to.kind == "f" or np.array_equal(made, array):
                    cast[name] = made
    return replace(sample, **cast) if cast else sample


class _Waiting:
    """Samples of one side whose partner has not come yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory: dict[str, tuple[int, Sample]] = {}
        self.disk: sqlite3.Connection | None = None

    def put(self, ordinal: int, sample: Sample) -> None:
        if len(self.memory) < WINDOW:
            self.memory[sample.sample_id] = (ordinal, sample)
            return
        if self.disk is None:
            self.disk = sqlite3.connect("", isolation_level=None)
            self.disk.execute("PRAGMA journal_mode = OFF")
            self.disk.execute("PRAGMA synchronous = OFF")
            self.disk.execute(
                "CREATE TABLE waiting (id TEXT PRIMARY KEY, ordinal INT, sample TEXT)"
            )
        row = (
            _key(sample.sample_id),
            ordinal,
            json.dumps(sample.to_dict(numpy=True), default=np.ndarray.tolist),
        )
        self.disk.execute("INSERT INTO waiting VALUES (?, ?, ?)", row)

    def refuse_duplicate(self, sample_id: str, matched: bool) -> None:
        if matched or self._holds(sample_id):
            raise trace_error(f"{self.name}: sample_id {sample_id!r:.60}", "occurs twice", "MM007")

    def _holds(self, sample_id: str) -> bool:
        if sample_id in self.memory or self.disk is None:
            return sample_id in self.memory
        query = "SELECT 1 FROM waiting WHERE id = ?"
        return self.disk.execute(query, (_key(sample_id),)).fetchone() is not None

    def take(self, sample_id: str) -> tuple[int, Sample] | None:
        if sample_id in self.memory:
            return self.memory.pop(sample_id)
        if self.disk is None:
            return None
        key = _key(sample_id)
        query = "SELECT ordinal, sample FROM waiting WHERE id = ?"
        row = self.disk.execute(query, (key,)).fetchone()
        if row is None:
            return None
        self.disk.execute("DELETE FROM waiting WHERE id = ?", (key,))
        return row[0], _read_back(row[1], sample_id)

    def rest(self) -> Iterator[tuple[int, str, Sample | None]]:
        """Those that are left; of the first MOST, the samples."""
        for sample_id, (ordinal, sample) in self.memory.items():
            yield ordinal, sample_id, sample
        if self.disk is not None:
            query = "SELECT id, ordinal, sample FROM waiting ORDER BY ordinal"
            for k, (key, ordinal, text) in enumerate(self.disk.execute(query)):
                sample_id = json.loads(key)
                yield ordinal, sample_id, _read_back(text, sample_id) if k < MOST else None

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()


def _read_back(text: str, sample_id: str) -> Sample:
    return Sample.from_dict(json.loads(text), f"compare: sample {sample_id!r:.60}")


def _digest(sample_id: str) -> bytes:
    return hashlib.blake2b(_key(sample_id).encode(), digest_size=16).digest()


def _key(sample_id: str) -> str:
    return json.dumps(sample_id)  # ASCII: an id may hold a lone surrogate, which UTF-8 can't


Numbered = tuple[int, Sample]  # with its number in the trace, from 0
Step = tuple[Numbered | None, Numbered | None]
# optional fields that `Sample.from_dict` reads without a look at others
_ALONE = {name for name, column in Sample.columns().items() if not column.required} - {
    *("schema_version", "position_ids", "attention_mask", "metadata"),
    *("kept_ids", "teachers", "routed_experts"),
}


def side_by_side(rollout: TraceReader, train: TraceReader) -> Iterator[Step]:
    """Yield the next sample of each trace; None after the end of one. Raises TraceError."""
    ids = Ids(), Ids()
    for left, right in _windows(rollout.blocks(), train.blocks()):
        if left is not None and right is not None:
            yield from _both(left, right, ids)
        elif left is not None:
            yield from ((own, None) for own in _read_alone(left, ids[0]))
        elif right is not None:
            yield from ((None, own) for own in _read_alone(right, ids[1]))


def _windows(*files: Iterator[Block]) -> Iterator[list[Block | None]]:
    """The next rows of two files, as many of each; of one file once the other has ended."""
    blocks = [next(file, None) for file in files]
    while any(blocks):
        rows = min(block.rows for block in blocks if block is not None)
        yield [block and block.slice(0, rows) for block in blocks]
        for k, block in enumerate(blocks):
            if block is not None:
                rest = block.slice(rows, block.rows)
                blocks[k] = rest if rest.rows else next(files[k], None)


def _read_alone(block: Block, ids: Ids) -> Iterator[Numbered]:
    for number, record in block.records():
        yield _new(ids, block, number, Sample.from_dict(record, block.where(number)))


def _both(left: Block, right: Block, ids: tuple[Ids, Ids]) -> Iterator[Step]:
    """The samples of as many rows of both; a right one takes over what it has in common with the left one."""
    unlike = _unlike(left, right)
    one_limit = left.max_record_bytes == right.max_record_bytes
    shown = {n: c for n, c in right.columns.items() if n in unlike or n == "schema_version"}
    rights = replace(right, columns=shown).unparsed()
    for (number, mine), (other, theirs) in zip(left.unparsed(), rights, strict=True):
        sample = Sample.from_dict(left.parsed(number, mine), left.where(number))
        one = _new(ids[0], left, number, sample)
        changed = [n for n in unlike if not (one_limit and _same(mine.get(n), theirs.get(n)))]
        theirs = {name: value for name, value in mine.items() if name not in unlike} | theirs
        yield one, _new(ids[1], right, other, _changed(sample, changed, right, other, theirs))


def _unlike(left: Block, right: Block) -> list[str]:
    """The columns that differ in any row; all of them where the two traces' records may be of different size."""
    names = dict.fromkeys([*left.columns, *right.columns])
    if left.max_record_bytes != right.max_record_bytes:
        return list(names)
    pairs = ((name, left.columns.get(name), right.columns.get(name)) for name in names)
    return [name for name, a, b in pairs if a is None or b is None or not a.equals(b)]


def _same(a: Any, b: Any) -> bool:
    """Whether values are surely equal: in Python, 1 in a list equals 1.0, which `Sample.from_dict` refuses."""
    return not isinstance(a, dict | list) and same(a, b)


def _changed(
    sample: Sample, names: Sequence[str], block: Block, number: int, record: dict[str, Any]
) -> Sample:
    """The sample of a record that differs from `sample`, if at all, in the fields `names`. Raises TraceError."""
    where = block.where(number)
    if not _ALONE.issuperset(names):
        return Sample.from_dict(block.parsed(number, record), where)
    if not names:
        return sample
    read = block.parsed(number, record, names)
    columns = Sample.columns()
    fields: dict[str, Any] = dict.fromkeys(names)
    for name in filter(read.__contains__, names):
        fields[name] = columns[name].spec.read(read[name], f"{where}.{name}")
    return replace(sample, **fields)


def _new(ids: Ids, block: Block, number: int, sample: Sample) -> Numbered:
    """Raises: TraceError (MM007) for an id that came before."""
    ids.add(sample.sample_id, block.where(number))
    return number - 1, sample
