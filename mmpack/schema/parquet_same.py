"""Two Parquet files of one schema: which columns hold the same bytes in both, so that one reading serves both.

Files whose schemas or row groups differ share no column: each is read in full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mmpack.schema.error_text import trace_error
from mmpack.schema.parquet_pages import chunk_range, naming_broken, read_footer

PIECE_BYTES = 2**20
# Fields of ColumnChunk and ColumnMetaData in parquet.thrift that say only where something lies.
CHUNK_PLACES, METADATA_PLACES = {2, 3, 4, 5, 6, 7}, {9, 10, 11, 14}
CRYPTO = {8, 9}  # of ColumnChunk
Same = Callable[[int], frozenset[str]]
Stamp = tuple[int, ...]


def stamp(of: os.stat_result) -> Stamp:
    """Tells whether a path still names the file that was opened."""
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns


def no_columns(group: int) -> frozenset[str]:
    """Of a trace that is read without another."""
    return frozenset()


@contextmanager
def same_columns(path: Path, other: Path, leaves: Sequence[str]) -> Iterator[tuple[Same, Stamp]]:
    """Yield a function of a row group's number, and the stamp of `other` as it was compared.

    The function names the columns of `path` that are equal in every byte of their pages in the same group of `other`.
    `leaves`: the paths of the schema's columns, in their order. Raises TraceError (MM001) for a broken `other`.
    """
    with path.open("rb") as file, _opened(other) as second:
        files = file, second
        mine, theirs = (
            read_footer(f, f"{p}")[1] for f, p in zip(files, (path, other), strict=True)
        )
        with naming_broken(f"{other}"):
            groups = mine.get(4, []), theirs.get(4, [])
            rows = [[group[3] for group in of] for of in groups]
            both = enumerate(zip(*rows, strict=False))
            aligned = next((k for k, (a, b) in both if a != b), min(map(len, rows)))
            # schema; key-value metadata, in which Arrow keeps types
            if any(mine.get(field) != theirs.get(field) for field in (2, 5)):
                aligned = 0

        def same(group: int) -> frozenset[str]:
            if group >= aligned:
                return frozenset()
            with naming_broken(f"{other}"):
                return _equal_columns(files, [of[group][1] for of in groups], leaves)

        yield same, stamp(os.fstat(second.fileno()))


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise trace_error(
            f"{path}", f"can't be read as Parquet: {error.strerror}", "MM001"
        ) from None


def _equal_columns(
    files: tuple[IO[bytes], IO[bytes]], columns: list[list[dict[int, Any]]], leaves: Sequence[str]
) -> frozenset[str]:
    if not len(columns[0]) == len(columns[1]) == len(leaves):
        return frozenset()
    found: dict[str, bool] = {}
    for leaf, *pair in zip(leaves, *columns, strict=True):
        path = [step.decode("utf-8", "replace") for step in pair[0][3][3]]
        if ".".join(path) != leaf:
            return frozenset()
        alike = _facts(pair[0]) == _facts(pair[1]) and not CRYPTO & pair[0].keys()
        alike = alike and _same_bytes(files, [chunk_range(column[3]) for column in pair])
        found[path[0]] = found.get(path[0], True) and alike
    return frozenset(name for name, alike in found.items() if alike)


def _facts(column: dict[int, Any]) -> list[dict[int, Any]]:
    """All that is said of a chunk, but where it lies."""
    said = [(column, CHUNK_PLACES), (column[3], METADATA_PLACES)]
    return [{k: v for k, v in of.items() if k not in places} for of, places in said]


def _same_bytes(files: tuple[IO[bytes], IO[bytes]], ranges: list[tuple[int, int]]) -> bool:
    (start, stop), (other, end) = ranges
    if stop - start != end - other:
        return False
    for offset in range(0, stop - start, PIECE_BYTES):
        length = min(PIECE_BYTES, stop - start - offset)
        pieces = []
        for file, at in zip(files, (start, other), strict=True):
            file.seek(at + offset)
            pieces.append(file.read(length))
        if pieces[0] != pieces[1] or len(pieces[0]) < length:
            return False
    return True
