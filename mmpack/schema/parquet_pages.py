"""How much a Parquet file really holds, found before anything is decoded.

A footer may lie and a page may declare 2^31 values in ten bytes; pyarrow believes both and allocates
first, and a footer that contradicts itself can end the process. So footer and page headers are read
here: Thrift compact structs, fields by their ids in Parquet's parquet.thrift.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import IO, Any

from mmpack.schema.error_text import escaped, trace_error

MAGIC = b"PAR1"
FOOTER_BYTES = 2**24  # some thousands of row groups
FIRST_BYTES, HEADER_BYTES = 2**9, 2**16  # of a page's header: most are short
BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY = 6, 7
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
OWN_HEADER = {DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_V2: 8}  # kind of page -> field
ENCODING = {
    DATA_PAGE: 2,
    DICTIONARY_PAGE: 2,
    DATA_PAGE_V2: 4,
}  # kind of page -> field of that header
PLAIN, PLAIN_DICTIONARY, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 0, 2, 7, 8


@dataclass(frozen=True)
class Chunk:
    """One column of one row group: its values, and the bytes of its pages once decompressed.

    A value may take `repeated_bytes`: all of a dictionary, or of a page of shared prefixes.
    `as_dictionary`: texts that pyarrow can leave as a dictionary and indices. `place`: [start, stop) of
    the pages in the file. `kind`, `codec`: physical type and compression, as parquet.thrift numbers them.
    """

    name: str
    is_text: bool
    is_nested: bool
    values: int
    page_bytes: int
    largest_page: int
    repeated_bytes: int
    as_dictionary: bool
    place: tuple[int, int]
    kind: int
    codec: int


@dataclass(frozen=True)
class Page:
    """A page: its kind, its own header by field ids, [start, stop) in the file, and its bytes once decompressed."""

    kind: int
    own: dict[int, Any]
    start: int
    stop: int
    unpacked: int

    @property
    def count(self) -> int:
        """Values; of a dictionary, its entries."""
        return int(self.own[1])


def read_row_groups(file: IO[bytes], where: str) -> list[tuple[int, list[Chunk]]]:
    """Rows and column chunks of each row group of `file`, after a look at every page header.

    A row group of 0 rows has no chunks: it may have no pages, and isn't to be read.

    Raises TraceError: MM001 if file, footer and pages contradict each other, MM010 for a footer
    beyond 16 MiB.
    """
    size, footer = read_footer(file, where)
    with naming_broken(where):
        groups = [
            (index(group[3]), [column[3] for column in group[1]]) for group in footer.get(4, [])
        ]
        ranges = [chunk_range(column) for rows, columns in groups if rows for column in columns]
        if sum(max(stop - start, 0) for start, stop in ranges) > size:
            raise trace_error(where, "has columns that share pages", "MM001")
        return [
            (rows, _chunks(file, size, rows, columns, f"{where}: row group {i}"))
            for i, (rows, columns) in enumerate(groups)
        ]


def read_footer(file: IO[bytes], where: str) -> tuple[int, dict[int, Any]]:
    """The bytes of `file`, and its footer by field ids. Raises TraceError (MM001, MM010)."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 8, 0))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or length > size - 8:
        raise trace_error(where, "is not a whole Parquet file", "MM001")
    if length > FOOTER_BYTES:
        raise trace_error(
            where, f"has a footer of {length} bytes, more than {FOOTER_BYTES}", "MM010"
        )
    file.seek(size - 8 - length)
    with naming_broken(where):
        return size, _Thrift(file.read(length)).struct()


@contextmanager
def naming_broken(where: str) -> Iterator[None]:
    """Fields that are missing or of another type end in a TraceError (MM001)."""
    try:
        yield
    except (IndexError, KeyError, TypeError, AttributeError):
        raise trace_error(where, "has a broken Parquet footer or page header", "MM001") from None


def chunk_range(column: dict[int, Any]) -> tuple[int, int]:
    """The bytes [start, stop) of a chunk's pages: the dictionary page first, if there is one."""
    start = min(column[9], column.get(11) or column[9])
    return start, start + column[7]


def _chunks(
    file: IO[bytes], size: int, rows: int, columns: list[dict[int, Any]], where: str
) -> list[Chunk]:
    if rows == 0:
        if any(column[5] for column in columns):
            raise trace_error(where, "has values, but 0 rows", "MM001")
        return []
    chunks = [_chunk(file, size, column, where) for column in columns]
    for chunk in chunks:
        if chunk.values < rows or (chunk.values > rows and not chunk.is_nested):
            why = f"has {chunk.values} values for {rows} rows"
            raise trace_error(f"{where}, {escaped(chunk.name)}", why, "MM001")
    return chunks


def _chunk(file: IO[bytes], size: int, column: dict[int, Any], where: str) -> Chunk:
    path = [step.decode("utf-8", "replace") for step in column[3]]
    where = f"{where}, {escaped(path[0])}"
    start, stop = chunk_range(column)
    if not 0 <= start <= stop <= size:
        raise trace_error(where, f"has its pages at [{start}, {stop}) of {size} bytes", "MM001")
    values = page_bytes = largest_page = repeated_bytes = 0
    encodings = set()
    for page in pages(file, start, stop, where):
        if page.kind != DICTIONARY_PAGE:
            values += page.count
            encodings.add(page.own[ENCODING[page.kind]])
        elif page.count * 4 > page.unpacked:  # each of its values has four bytes or more
            why = f"has {page.count} values in a page of {page.unpacked} bytes"
            raise trace_error(where, why, "MM001")
        if page.kind == DICTIONARY_PAGE or page.own[ENCODING[page.kind]] == DELTA_BYTE_ARRAY:
            repeated_bytes = max(repeated_bytes, page.unpacked)
        page_bytes += page.unpacked
        largest_page = max(largest_page, page.unpacked)
    if values != column[5]:
        raise trace_error(where, f"has {values} values, its footer says {column[5]}", "MM001")
    is_text = column[1] in (BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY)
    is_nested = len(path) > 1
    as_dictionary = (
        column[1] == BYTE_ARRAY
        and not is_nested
        and encodings <= {PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY}
    )
    return Chunk(
        path[0],
        is_text,
        is_nested,
        values,
        page_bytes,
        largest_page,
        repeated_bytes,
        as_dictionary,
        (start, stop),
        column[1],
        column[4],
    )


def pages(file: IO[bytes], start: int, stop: int, where: str) -> Iterator[Page]:
    """The pages of the chunk at [start, stop) of `file`. Raises TraceError (MM001)."""
    at = start
    with naming_broken(where):
        while at < stop:
            header, length = _header(file, at, stop)
            kind, unpacked, packed = header[1], header[2], header[3]
            own = header[OWN_HEADER[kind]]
            if not all(0 <= n < 2**31 for n in (unpacked, packed, own[1])):
                raise trace_error(
                    where, f"has a page of {unpacked} bytes and {own[1]} values", "MM001"
                )
            first = at + length
            at = first + packed
            if at > stop:
                raise trace_error(where, f"has a page that ends at {at}, beyond {stop}", "MM001")
            yield Page(kind, own, first, at, unpacked)


def _header(file: IO[bytes], start: int, stop: int) -> tuple[dict[int, Any], int]:
    """A page's header and its length. Raises IndexError."""
    for most in (FIRST_BYTES, HEADER_BYTES):
        file.seek(start)
        reader = _Thrift(file.read(min(most, stop - start)))
        try:
            return reader.struct(), reader.at
        except IndexError:
            if most == HEADER_BYTES:
                raise
    raise IndexError


class _Thrift:
    """The compact protocol, read into dicts by field id. IndexError: cut off, or not Thrift."""

    MAX_DEPTH = 12

    def __init__(self, data: bytes):
        self.data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        out: dict[int, Any] = {}
        field = 0
        while byte := self._byte():
            field = field + (byte >> 4) if byte >> 4 else self._zigzag()
            kind = byte & 15
            if 4 <= kind <= 6:
                out[field] = self._zigzag()
            else:  # a boolean is its kind
                out[field] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return out

    def _value(self, kind: int, depth: int) -> Any:
        if depth > self.MAX_DEPTH:
            raise IndexError
        if kind in (4, 5, 6):  # i16, i32, i64
            return self._zigzag()
        if kind == 8:  # binary
            return self._bytes(self._varint())
        if kind in (9, 10):  # list, set
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (1, 2, 3):  # boolean in a list, byte
            return self._byte()
        if kind == 7:  # double
            return self._bytes(8)
        raise IndexError  # maps: Parquet has none

    def _byte(self) -> int:
        at = self.at
        self.at = at + 1
        return self.data[at]

    def _bytes(self, length: int) -> bytes:
        self.at += length
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - length : self.at]

    def _varint(self) -> int:
        at = self.at
        byte = out = self.data[at]
        if byte < 128:
            self.at = at + 1
            return out
        out, shift = 0, 0
        while byte & 128:
            out |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise IndexError
            at += 1
            byte = self.data[at]
        self.at = at + 1
        return out | byte << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
