"""Bounds on what a Parquet trace decodes to, from page headers and levels: refuse too much, or choose batches."""

from __future__ import annotations

from typing import IO

import numpy as np

from mmpack.errors import require
from mmpack.schema.bounds import Total
from mmpack.schema.error_text import escaped, trace_error
from mmpack.schema.parquet_pages import DATA_PAGE_V2, DICTIONARY_PAGE, Chunk, Page, pages

BATCH_ROWS, BATCH_BYTES = 512, 8 * 2**20  # that are decoded at a time, levels included
BATCH_RECORDS = 4  # the most records of the largest size in rows that are decoded at a time, unless it is one row
PAGE_RECORDS = 8  # and in a page, which is decompressed whole
LEVEL_BYTES = 16  # a decoded value (8) with its levels and offsets
WIDTHS = {0: 1, 1: 4, 4: 4}  # bytes of a value by physical type, where it is not 8


def texts_of(names: set[str], groups: list[list[Chunk]]) -> list[str]:
    """The columns to leave as dictionaries: then a long text that returns is held once."""
    refused = {c.name for chunks in groups for c in chunks if not c.as_dictionary}
    return sorted(names & {c.name for chunks in groups for c in chunks} - refused)


def bounded(
    file: IO[bytes],
    groups: list[tuple[int, list[Chunk]]],
    levels: list[int],
    texts: list[str],
    total: Total,
    max_record_bytes: int,
    where: str,
) -> list[int]:
    """Return how many rows to decode at a time, for each row group.

    `levels`: the largest repetition level of each column. `texts` are not counted, what they decode to is known only
    from their indices. Raises TraceError: MM010 for too much in all, in one page or in one row; MM001.
    """
    first, out = 1, []
    for i, (rows, chunks) in enumerate(groups):
        place = f"{where}: row group {i}"
        for chunk in chunks:
            if chunk.largest_page > PAGE_RECORDS * max_record_bytes:
                why = f"has a page of {chunk.largest_page} bytes, more than {PAGE_RECORDS} records of the largest size"
                raise trace_error(f"{place}, {escaped(chunk.name)}", why, "MM010")
            total.add(_decoded_bytes(chunk), place)
        if chunks and len(chunks) != len(levels):
            raise trace_error(place, f"has {len(chunks)} columns of {len(levels)}", "MM001")
        sizes = np.zeros(0, np.int64)  # bytes of each row, of the columns that may hold a large one
        for chunk, level in zip(chunks, levels, strict=False):
            width = WIDTHS.get(chunk.kind, 8)
            if level and chunk.values * width > max_record_bytes:
                lengths = row_lengths(file, chunk, rows, level, place)
                longest = int(lengths.argmax())
                if lengths[longest] * width > max_record_bytes:
                    why = f"is larger than {max_record_bytes} bytes"
                    raise trace_error(f"{where}: record {first + longest}", why, "MM010")
                more = lengths * (width + LEVEL_BYTES)
                sizes = sizes + more if len(sizes) else more
        out.append(_batch_rows(rows, chunks, texts, sizes, max_record_bytes))
        first += rows
    return out


def _decoded_bytes(chunk: Chunk) -> int:
    count = chunk.page_bytes + chunk.values * LEVEL_BYTES
    return count + (chunk.values * chunk.repeated_bytes if chunk.is_text and chunk.is_nested else 0)


def _batch_rows(
    rows: int, chunks: list[Chunk], texts: list[str], sizes: np.ndarray, max_record_bytes: int
) -> int:
    row_bytes = 1 + sum(map(_decoded_bytes, chunks)) // max(rows, 1)
    for chunk in chunks:
        if chunk.is_text and not chunk.is_nested and chunk.name not in texts:
            row_bytes += chunk.repeated_bytes
    out = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
    while out > 1 and len(sizes):  # rows may differ much in length
        if (
            np.add.reduceat(sizes, np.arange(0, rows, out)).max()
            <= BATCH_RECORDS * max_record_bytes
        ):
            break
        out //= 2
    return out


RLE = 3
REP_ENCODING = 4  # field of a data page's own header
REP_LENGTH = 6  # of a version 2 header
MAX_RUNS = 2**22  # of a chunk: as many are read in seconds
STREAMED = {
    2: "gzip",
    4: "brotli",
    6: "zstd",
}  # codecs whose first bytes can be decompressed without the rest
WHOLE = {1: "snappy", 7: "lz4_raw"}


def row_lengths(file: IO[bytes], chunk: Chunk, rows: int, max_level: int, where: str) -> np.ndarray:
    """int64 [rows]: the values of each row of a chunk, those of lists within lists included.

    `max_level`: the column's largest repetition level, 1 or more. Raises TraceError: MM001 for levels that contradict
    the page, MM010 for levels that can't be looked at.
    """
    where = f"{where}, {escaped(chunk.name)}"
    starts, base, runs = [], 0, 0
    for page in pages(file, *chunk.place, where):
        if page.kind == DICTIONARY_PAGE:
            continue
        try:
            found, used = _row_starts(_levels(file, chunk, page, where), page.count, max_level)
        except IndexError:
            raise trace_error(where, "has broken repetition levels", "MM001") from None
        runs += used
        if runs > MAX_RUNS:
            raise trace_error(where, f"has more than {MAX_RUNS} runs of repetition levels", "MM010")
        starts.append(found + base)
        base += page.count
    first = np.concatenate([np.zeros(0, np.int64), *starts])
    if len(first) != rows or (rows and first[0] != 0):
        raise trace_error(where, f"has {len(first)} rows, its footer says {rows}", "MM001")
    return np.diff(first, append=base)


def _levels(file: IO[bytes], chunk: Chunk, page: Page, where: str) -> bytes:
    """The encoded repetition levels of a page."""
    file.seek(page.start)
    packed = file.read(page.stop - page.start)
    if page.kind == DATA_PAGE_V2:  # never compressed
        return packed[: page.own[REP_LENGTH]]
    if page.own[REP_ENCODING] != RLE:
        raise trace_error(where, "has repetition levels of an encoding that is not RLE", "MM010")
    head = _unpacked(packed, 4, chunk, page, where)
    length = int.from_bytes(head[:4], "little")
    if len(head) < 4 or length > page.unpacked - 4:
        raise IndexError
    if len(head) < 4 + length:
        head = _unpacked(packed, 4 + length, chunk, page, where)
    return head[4 : 4 + length]


def _unpacked(packed: bytes, count: int, chunk: Chunk, page: Page, where: str) -> bytes:
    """The first `count` bytes of a page, or more."""
    if chunk.codec == 0:
        return packed
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    if chunk.codec in STREAMED:
        with pyarrow.CompressedInputStream(
            pyarrow.BufferReader(packed), STREAMED[chunk.codec]
        ) as stream:
            out: bytes = stream.read(count)
            return out
    if chunk.codec in WHOLE:
        return pyarrow.decompress(  # type: ignore[no-any-return]
            packed, decompressed_size=page.unpacked, codec=WHOLE[chunk.codec], asbytes=True
        )
    why = "may hold a record that is too large, its compression hides where rows start"
    raise trace_error(where, why, "MM010")


def _row_starts(data: bytes, count: int, max_level: int) -> tuple[np.ndarray, int]:
    """Where the levels that are 0 stand among `count` levels, and the number of runs. Raises IndexError."""
    width = max_level.bit_length()
    value_bytes = -(-width // 8)
    starts: list[np.ndarray] = []
    at = place = runs = 0
    while place < count and runs <= MAX_RUNS:
        header, at = _varint(data, at)
        runs += 1
        length = header >> 1
        if length == 0:
            raise IndexError
        if header & 1:  # `length` groups of 8 levels of `width` bits
            stop = at + length * width
            if stop > len(data):
                raise IndexError
            bits = np.unpackbits(np.frombuffer(data[at:stop], np.uint8), bitorder="little")
            is_start = bits.reshape(-1, width).max(axis=1)[: count - place] == 0
            starts.append(np.flatnonzero(is_start) + place)
            place += length * 8
            at = stop
            continue
        if at + value_bytes > len(data):
            raise IndexError
        if not any(data[at : at + value_bytes]):
            starts.append(np.arange(place, min(place + length, count), dtype=np.int64))
        place += length
        at += value_bytes
    return np.concatenate([np.zeros(0, np.int64), *starts]), runs


def _varint(data: bytes, at: int) -> tuple[int, int]:
    out = shift = 0
    while True:
        byte = data[at]
        at += 1
        out |= (byte & 127) << shift
        if byte < 128:
            return out, at
        shift += 7
        if shift > 35:
            raise IndexError
