"""Trace files: one sample per record, as .jsonl, .jsonl.zst or .parquet. Streamed both ways.

Reading holds one record (of JSON Lines) or a few row batches (of Parquet) at a time. Nothing in a
file is ever unpickled or opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, TraceError
from mmpack.files import reading, replaced
from mmpack.schema.dead_letters import KEPT, DeadLetters, letter_of
from mmpack.schema.error_text import escaped, trace_error
from mmpack.schema.jsonl import read_jsonl, write_jsonl
from mmpack.schema.parquet import Block, read_blocks, read_parquet, write_parquet
from mmpack.schema.sample import VERSIONS, Sample, version_faults

MAX_RECORD_BYTES = 32 * 2**20
LONG_ID = 64  # characters
FORMATS = (".jsonl", ".jsonl.zst", ".parquet")


def read_trace(
    path: str | os.PathLike[str],
    media: Mapping[str, Any] | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    dead_letters: DeadLetters | None = None,
) -> TraceReader:
    """Open a trace; its samples are read as they are asked for, each time anew.

    Args: `path`: a .jsonl, .jsonl.zst or .parquet file. `media`: cache key -> pixel_values
    [t·h·w, patch_dim]; media whose key it lacks keep None. `max_record_bytes`: the largest record
    to accept; memory stays within a small multiple of it. A compressed file may decode to 32 such
    records, or to 1,024 times its own bytes. `dead_letters`: takes records of JSON Lines whose structure is wrong, and
    reading goes on; not what is wrong with a file as a whole (a record that is too large, zstd that is cut).

    Raises TraceError with file, record, field and a code (MM001 to MM010): here for a path that is
    no trace, while iterating for a record whose structure is wrong. Broken rules (MM1xx and up)
    are not looked for: see `validate`.

    Example:
        >>> import tempfile, numpy as np, mmpack as mp
        >>> ids = np.array([9, 8, 7])
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", ids, [], [], [mp.LossSpan(1, 3)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mp.write_trace(f"{folder}/t.jsonl", [sample])
        ...     list(mp.read_trace(f"{folder}/t.jsonl"))
        1
        [Sample('a', group_id='p', family='qwen2_5_vl', tokens=3, media=0, loss_tokens=2)]
    """
    source = _path_of(path, "read_trace")
    _format_of(source)
    try:
        if not source.is_file():
            why = "is not a file" if source.exists() else "does not exist"
            raise trace_error(f"{source}", why, "MM001")
        allowed = os.access(source, os.R_OK)
    except PermissionError:  # of a folder above it
        allowed = False
    if not allowed:
        raise trace_error(f"{source}", "can't be read: this user lacks the right", "MM001")
    reading(source, "a trace")
    return TraceReader(source, media, max_record_bytes, dead_letters)


def write_trace(
    path: str | os.PathLike[str], samples: Iterable[Sample], schema_version: str | None = None
) -> int:
    """Write `samples` as a trace and return how many: a failure leaves the old file or none.

    Links are followed, the mode of an old file is kept, and what a killed writer left is removed.
    The format follows from the name: .jsonl, .jsonl.zst or .parquet. Equal samples give equal
    bytes. Samples may come from a generator, also one that reads `path`, and are checked as
    `read_trace` would. `schema_version`: write all samples as this version; None keeps each sample's own. Version 1
    has none of `kept_ids`, `teachers` and `routed_experts`: a sample with one is refused (MM012). Raises TraceError
    (with the sample's number from 0, the field and a code), ArgumentError for what is not a sample.
    """
    target = _path_of(path, "write_trace")
    kind = _format_of(target)
    if isinstance(samples, Sample) or not isinstance(samples, Iterable):
        raise ArgumentError(
            f"write_trace: samples is {type(samples).__name__}, expected Samples. Fix: pass [sample]"
        )
    if schema_version is not None and schema_version not in VERSIONS:
        raise ArgumentError(
            f"write_trace: schema_version is {schema_version!r:.60}. Fix: use '1' or '2', or leave it out"
        )
    count = 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal count
        seen = Ids()
        for sample in samples:
            where = f"write_trace: samples[{count}]"
            if not isinstance(sample, Sample):
                raise ArgumentError(
                    f"{where} is a {type(sample).__name__}, expected a Sample. Fix: pass Samples"
                )
            if schema_version is not None and sample.schema_version != schema_version:
                sample = replace(sample, schema_version=schema_version)
            for fault in version_faults(sample, f"{where}."):
                raise fault
            checked = Sample.from_dict(sample.to_dict(numpy=True), where)
            seen.add(checked.sample_id, where)
            count += 1
            yield checked.to_dict(numpy=True)

    with replaced(target, "write_trace", TraceError) as file:
        if kind == ".parquet":
            write_parquet(file, records(), schema_version)
        else:
            write_jsonl(file, records(), zstd=kind == ".jsonl.zst")
    return count


class TraceReader:
    """The samples of a trace, in order, as often as asked; no file stays open in between."""

    def __init__(
        self,
        path: Path,
        media: Mapping[str, Any] | None,
        max_record_bytes: int,
        dead_letters: DeadLetters | None = None,
    ):
        self.path = path
        self.dead_letters = dead_letters
        self.media = media
        self.max_record_bytes = max_record_bytes

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples. Raises TraceError."""
        seen = Ids()
        for number, record in self._records():
            where = f"{self.path}: record {number}"
            try:
                sample = Sample.from_dict(record, where)
                seen.add(sample.sample_id, where)
            except TraceError as fault:
                if self.dead_letters is None or self.is_parquet:
                    raise
                self._bury(number, json.dumps(record).encode(), fault)
                continue
            if self.media is not None:
                for medium in sample.media:
                    medium.pixel_values = self.media.get(medium.cache_key)
            yield sample

    @property
    def is_parquet(self) -> bool:
        return _format_of(self.path) == ".parquet"

    def blocks(self) -> Iterator[Block]:
        """The rows of a Parquet trace, some at a time; see `read_blocks`. Raises TraceError."""
        return read_blocks(self.path, self.max_record_bytes)

    def _records(self) -> Iterator[tuple[int, Any]]:
        if self.is_parquet:
            return read_parquet(self.path, self.max_record_bytes)
        zstd = _format_of(self.path) == ".jsonl.zst"
        broken = None if self.dead_letters is None else self._bury
        return read_jsonl(self.path, self.max_record_bytes, zstd, broken)

    def _bury(self, number: int, line: bytes, fault: TraceError) -> None:
        assert self.dead_letters is not None
        text = line[:KEPT].decode("utf-8", "backslashreplace")
        self.dead_letters.add(letter_of(fault, f"{self.path}: record {number}", record=text))

    def __repr__(self) -> str:
        return f"TraceReader({str(self.path)!r})"


class Ids:
    """The sample ids seen so far, long ones as 16 bytes."""

    def __init__(self) -> None:
        self._seen: set[str | bytes] = set()

    def add(self, sample_id: str, where: str) -> None:
        """Raises TraceError (MM007) for an id that was seen before."""
        if not self.is_new(sample_id):
            raise repeated_id(sample_id, where)

    def is_new(self, sample_id: str) -> bool:
        """Whether an id was not seen before; it is from now on."""
        key: str | bytes = sample_id
        if len(sample_id) > LONG_ID:
            key = blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        count = len(self._seen)
        self._seen.add(key)
        return len(self._seen) > count


def repeated_id(sample_id: str, where: str) -> TraceError:
    return trace_error(f"{where}.sample_id", f"{escaped(sample_id)} occurs more than once", "MM007")


def _path_of(path: Any, what: str) -> Path:
    """Raises ArgumentError if `path` is no path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise ArgumentError(
            f"{what}: {path!r:.60} is not a path. Fix: pass the name of a file first"
        )
    return Path(text)


def _format_of(path: Path) -> str:
    for kind in FORMATS:
        if path.name.endswith(kind):
            return kind
    raise trace_error(f"{path}", f"is not named like a trace ({', '.join(FORMATS)})", "MM001")
