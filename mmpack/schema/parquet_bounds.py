"""Bounds on what a Parquet trace decodes to, from page headers and levels: refuse too much, or choose batches."""

from __future__ import annotations

from typing import IO

import numpy as np

from mmpack.schema.bounds import Total
from mmpack.schema.error_text import escaped, trace_error
from mmpack.schema.parquet_pages import Chunk
from mmpack.schema.parquet_rows import row_lengths

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
    rows: int,
    chunks: list[Chunk],
    texts: list[str],
    sizes: np.ndarray,
    max_record_bytes: int,
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
