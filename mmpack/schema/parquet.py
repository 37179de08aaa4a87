"""Parquet traces: arrays as list columns, free objects and lists of records as JSON text.

Arrays go from Arrow's buffers to numpy without a Python object per token.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

from mmpack.errors import require
from mmpack.schema.bounds import Total, checked_items
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.fields import Records
from mmpack.schema.jsonl import dump_json, parse_json
from mmpack.schema.parquet_bounds import bounded, texts_of
from mmpack.schema.parquet_lists import (
    arrays_to_arrow,
    ragged_to_arrow,
    read_arrays,
    read_ragged,
    read_teachers,
    teachers_to_arrow,
)
from mmpack.schema.parquet_pages import read_row_groups
from mmpack.schema.ragged import RaggedSpec, TeachersSpec
from mmpack.schema.routes import RoutesSpec
from mmpack.schema.sample import REPLAY, Sample
from mmpack.schema.specs import Array, Json, Spec

GROUP_BYTES, GROUP_ROWS = 16 * 2**20, 1024  # of a row group that is written, in required columns
MAX_GROUP_BYTES = 96 * 2**20  # of a row group that is written, in all columns
TEXT_BYTES = 8 * 2**20  # of texts that are held at a time
BUFFER_BYTES = 2**20
AS_TEXT = (Json, Records, RoutesSpec)  # JSON text columns


@dataclass(frozen=True)
class Block:
    """Some rows of a trace as Arrow arrays by column, texts decoded; columns without a value are left out."""

    path: str
    first: int  # number of the first record
    rows: int
    columns: dict[str, Any]
    max_record_bytes: int

    def slice(self, start: int, stop: int) -> Block:
        """The rows [start, stop), without a copy."""
        columns = {name: c.slice(start, stop - start) for name, c in self.columns.items()}
        return replace(self, first=self.first + start, rows=stop - start, columns=columns)

    def values(self, name: str) -> list[Any]:
        """A column as Python has it."""
        return self.columns[name].to_pylist() if name in self.columns else [None] * self.rows

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (record number from 1, record), arrays as numpy, absent fields left out. Raises TraceError."""
        for number, record in self.unparsed():
            yield number, self.parsed(number, record)

    def unparsed(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what `records` does, JSON as text. Raises TraceError."""
        yield from enumerate(_records(self), self.first)

    def parsed(
        self, number: int, record: dict[str, Any], names: Collection[str] | None = None
    ) -> dict[str, Any]:
        """A record of `unparsed` with its JSON parsed; of `names`, only that. Raises TraceError, also for its size."""
        where = self.where(number)
        if sum(map(_size, record.values())) > self.max_record_bytes:
            raise trace_error(where, f"is larger than {self.max_record_bytes} bytes", "MM010")
        return record | {
            name: parse_text(record[name], self.max_record_bytes, f"{where}.{name}")
            for name in _texts()
            if name in record
            and (names is None or name in names)
            and not (name in REPLAY and record.get("schema_version") == "1")
        }

    def where(self, number: int) -> str:
        """How errors name a record."""
        return f"{self.path}: record {number}"


def read_blocks(path: Path, max_record_bytes: int) -> Iterator[Block]:
    """Yield the rows of a Parquet trace, some at a time.

    Raises TraceError: MM001 not Parquet or corrupt, MM004 a missing column, MM010 a record larger than
    `max_record_bytes`, or a file that decodes to more than `bounds.Total` allows.
    """
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    require("pyarrow.compute", "parquet", "read_trace of a .parquet file")
    try:
        with path.open("rb") as file:
            yield from _blocks(file, f"{path}", max_record_bytes)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())[:200]
        raise trace_error(f"{path}", f"can't be read as Parquet: {why}", "MM001") from None


def read_parquet(path: Path, max_record_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (record number from 1, record), arrays as numpy, absent fields left out.

    Raises TraceError as `read_blocks` does, and MM003 for a column of another type, MM010 for a
    record larger than `max_record_bytes`.
    """
    for block in read_blocks(path, max_record_bytes):
        yield from block.records()


def write_parquet(
    file: IO[bytes], records: Iterable[dict[str, Any]], schema_version: str | None = None
) -> None:
    """Write `records` to `file`, in row groups, see `_row_groups`. `schema_version`: of all records, if it is one."""
    pyarrow = require("pyarrow", "parquet", "write_trace of a .parquet file")
    parquet = require("pyarrow.parquet", "parquet", "write_trace of a .parquet file")
    absent = REPLAY if schema_version == "1" else ()
    schema = pyarrow.schema(
        [(n, arrow_type_of(c.spec, pyarrow)) for n, c in _columns() if n not in absent]
    )
    with parquet.ParquetWriter(
        file, schema, compression="zstd", write_page_checksum=True, store_schema=False
    ) as writer:
        for rows in _row_groups(records):
            columns = [
                to_arrow(name, [r.get(name) for r in rows], pyarrow) for name in schema.names
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def _columns() -> list[tuple[str, Any]]:
    return list(Sample.columns().items())


@functools.cache
def _texts() -> list[str]:
    """The columns of JSON text, in order."""
    return [name for name, column in _columns() if isinstance(column.spec, AS_TEXT)]


# ---- reading -------------------------------------------------------------------------------------


def _blocks(file: IO[bytes], path: str, max_record_bytes: int) -> Iterator[Block]:
    """The blocks of an open file: pyarrow reads it once its footer and pages are known to be what they say."""
    parquet = require("pyarrow.parquet", "parquet", "read_trace of a .parquet file")
    groups = read_row_groups(file, path)
    total = Total(os.fstat(file.fileno()).st_size, max_record_bytes)
    metadata = parquet.read_metadata(file)
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    texts = texts_of({leaf.path for leaf in leaves}, [chunks for _, chunks in groups])
    levels = [leaf.max_repetition_level for leaf in leaves]
    batch_rows = bounded(file, groups, levels, texts, total, max_record_bytes, path)
    reader = parquet.ParquetFile(
        file,
        metadata=metadata,
        buffer_size=BUFFER_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
        read_dictionary=texts,
    )
    _check_names(reader.schema_arrow.names, path)
    first = 1
    for group, (rows, _) in enumerate(groups):
        if rows:
            batches = reader.iter_batches(batch_rows[group], row_groups=[group])
            start = Block(path, first, rows, {}, max_record_bytes)
            yield from _blocks_of(batches, start, total, f"{path}: row group {group}")
            first += rows


def _blocks_of(batches: Iterable[Any], group: Block, total: Total, where: str) -> Iterator[Block]:
    """The blocks of a row group, of which `group` has no columns yet."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    done = 0
    for batch in batches:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns = {n: c for n, c in columns.items() if c.null_count < len(c)}
        sizes = _text_sizes(columns, batch.num_rows, pyarrow)
        total.add(int(sizes.sum()), where)
        for a, b in _parts(sizes):
            part = {n: _decoded(c.slice(a, b - a), pyarrow) for n, c in columns.items()}
            yield replace(group, first=group.first + done, rows=b - a, columns=part)
            done += b - a
    if done != group.rows:
        raise trace_error(where, f"has {done} rows, its footer says {group.rows}", "MM001")


def _check_names(names: list[str], where: str) -> None:
    wanted = [n for n, c in _columns() if c.required or n == "schema_version"]
    missing = [n for n in wanted if n not in names]
    if len(missing) == len(wanted):
        raise trace_error(where, f"has no column of a trace, but {len(names)} others", "MM001")
    if missing:
        raise trace_error(f"{where}: {missing[0]}", "has no column", "MM004")
    if len(set(names)) != len(names):
        raise trace_error(where, "has two columns of one name")


def _text_sizes(columns: dict[str, Any], rows: int, pyarrow: ModuleType) -> np.ndarray:
    """int64 [rows]: bytes of the texts that are still in dictionaries.

    Raises ArrowInvalid for what is not UTF-8, or points beyond its dictionary.
    """
    sizes = np.zeros(rows, np.int64)
    for column in columns.values():
        if pyarrow.types.is_dictionary(column.type):
            column.validate(full=True)
            indices = column.indices.fill_null(0) if column.null_count else column.indices
            lengths = pyarrow.compute.binary_length(column.dictionary).to_numpy()
            sizes += lengths[indices.to_numpy()]
        elif pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
            column.validate(full=True)
    return sizes


def _parts(sizes: np.ndarray) -> Iterable[tuple[int, int]]:
    """Cuts a batch into parts [start, stop) whose texts take about TEXT_BYTES (or one row) each."""
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // TEXT_BYTES)) + 1
    return pairwise([0, *cuts.tolist(), len(sizes)])


def _decoded(column: Any, pyarrow: ModuleType) -> Any:
    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _records(block: Block) -> Iterator[dict[str, Any]]:
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    specs = Sample.columns()
    columns: dict[str, list[Any]] = {}
    old = [version == "1" for version in block.values("schema_version")]
    for name, column in block.columns.items():
        spec = specs[name].spec if name in specs else None
        if name in REPLAY and any(old):  # unknown to version 1
            values = column.to_pylist()
            if not all(old):
                rows = pyarrow.array([None if o else i for i, o in enumerate(old)], pyarrow.int64())
                known = _values(column.take(rows), name, spec, block)
                values = [v if o else k for v, k, o in zip(values, known, old, strict=True)]
            columns[name] = values
        else:
            columns[name] = _values(column, name, spec, block)
    for i in range(block.rows):
        row = ((name, values[i]) for name, values in columns.items())
        yield {  # arrays are copied: one must not keep its whole batch alive
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in row
            if value is not None
        }


def _values(column: Any, name: str, spec: Spec | None, block: Block) -> list[Any]:
    """Return a column as `Sample.from_dict` takes it. Raises TraceError."""
    if isinstance(spec, Array):
        return read_arrays(column, name, block.path, block.first)
    if isinstance(spec, RaggedSpec):
        return read_ragged(column, name, block.path, block.first)
    if isinstance(spec, TeachersSpec):
        return read_teachers(column, name, block.path, block.first)
    return column.to_pylist()  # type: ignore[no-any-return]


def _size(value: Any) -> int:
    """Bytes of arrays and texts."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return len(value) if isinstance(value, str) else int(getattr(value, "nbytes", 0))


def parse_text(text: Any, max_record_bytes: int, where: str) -> Any:
    """The JSON value of a text column's entry. Raises TraceError (MM003, MM010)."""
    if not isinstance(text, str):
        raise trace_error(where, f"expected JSON text, found {shown(text)}")
    checked_items(text, max_record_bytes, where)
    try:
        return parse_json(text, where)
    except json.JSONDecodeError as error:
        raise trace_error(where, f"is not JSON at column {error.colno}: {error.msg}") from None


# ---- writing -------------------------------------------------------------------------------------


def _row_groups(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Cut by what every sample records: equal samples lie in equal groups, whatever else one side has."""
    rows: list[dict[str, Any]] = []
    required = total = 0
    for record in records:
        for name, column in _columns():
            if name not in record:
                continue
            if isinstance(column.spec, AS_TEXT):
                record[name] = dump_json(record[name])
            value = record[name]
            size = _size(value) or len(str(value))
            total += size
            required += size if column.required else 0
        rows.append(record)
        if required >= GROUP_BYTES or total >= MAX_GROUP_BYTES or len(rows) == GROUP_ROWS:
            yield rows
            rows, required, total = [], 0, 0
    if rows:
        yield rows


def arrow_type_of(spec: Spec, pyarrow: ModuleType) -> Any:
    """Return the Arrow type of a field's column: that of its spec, else string for JSON text."""
    return spec.arrow_type(pyarrow) or pyarrow.string()


def to_arrow(name: str, values: list[Any], pyarrow: ModuleType) -> Any:
    spec = Sample.columns()[name].spec
    if isinstance(spec, Array):
        return arrays_to_arrow(values, spec, pyarrow)
    if isinstance(spec, RaggedSpec):
        return ragged_to_arrow(values, pyarrow)
    if isinstance(spec, TeachersSpec):
        return teachers_to_arrow(values, pyarrow)
    try:
        return pyarrow.array(values, arrow_type_of(spec, pyarrow))
    except UnicodeEncodeError:
        bad = next(v for v in values if isinstance(v, str) and not _is_utf8(v))
        why = f"{shown(bad)} has half a surrogate pair, Parquet can't hold it"
        raise trace_error(f"write_trace: {name}", why) from None


def _is_utf8(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xE000 for c in text)
