"""JSON Lines traces, plain and zstd: one record per line, strict JSON, memory bounded by the longest.

Records are numbered from 1, by their lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from mmpack.errors import TraceError, require
from mmpack.schema.bounds import Total, checked_items
from mmpack.schema.error_text import escaped, trace_error

READ_BYTES = 2**20
ZSTD_READ_BYTES = 2**10  # 1 KiB of zstd holds at most 256 blocks, 32 MiB in all
ZSTD_WINDOW = 2**27
ZSTD_LEVEL = 3
BLANK_LINES = re.compile(rb"[\r\n]+")


def read_jsonl(
    path: Path,
    max_record_bytes: int,
    zstd: bool,
    broken: Callable[[int, bytes, TraceError], None] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (record number, parsed JSON) of each line that is not blank.

    `broken`: takes the lines that are no JSON of a record, in place of an error.

    Raises TraceError: MM001 not JSON, not UTF-8 or corrupt zstd; MM002 a cut last line; MM003 a
    key twice in one object; MM010 a record beyond `max_record_bytes`, of too many items or nested too deep, zstd that
    decodes to more than `bounds.Total` allows.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise trace_error(f"{path}", f"can't be read: {error.strerror}", "MM001") from None
    with file:
        chunks: Iterator[bytes] = iter(lambda: file.read(READ_BYTES), b"")
        total = Total(os.fstat(file.fileno()).st_size, max_record_bytes)
        if zstd:
            chunks = _zstd_chunks(file, path, total)
        for number, line, ended in _lines(chunks, max_record_bytes, path):
            where = f"{path}: record {number}"
            try:
                record = _parse_line(line, ended, max_record_bytes, total, where)
            except TraceError as fault:
                if broken is None:
                    raise
                broken(number, line, fault)
                continue
            yield number, record


def write_jsonl(file: IO[bytes], records: Iterable[dict[str, Any]], zstd: bool) -> None:
    """Write one line per record to `file`, which stays open."""
    lines = ((dump_json(record) + "\n").encode("ascii") for record in records)
    if not zstd:
        file.writelines(lines)
        return
    zstandard = require("zstandard", "zstd", "write_trace of a .zst file")
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
    with compressor.stream_writer(file, closefd=False) as out:
        for line in lines:
            out.write(line)


def dump_json(value: Any) -> str:
    """Compact ASCII JSON in the order given; numpy arrays become lists."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=np.ndarray.tolist)


def parse_json(text: str, where: str) -> Any:
    """Parse strict JSON. Raises json.JSONDecodeError, or TraceError for JSON that is no record.

    NaN, infinities and huge integers are left to the fields' specs, which know the field's name.
    """
    try:
        try:
            return json.loads(text, object_pairs_hook=_object)
        except (json.JSONDecodeError, _RepeatedKeyError):
            raise
        except ValueError:  # more digits than int() takes: let the spec say in which field
            return json.loads(text, object_pairs_hook=_object, parse_int=_bounded_int)
    except RecursionError:
        raise trace_error(where, "is nested too deep", "MM010") from None
    except _RepeatedKeyError as error:
        raise trace_error(where, f"has the key {escaped(str(error))} twice in one object") from None


class _RepeatedKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        raise _RepeatedKeyError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return out


def _bounded_int(digits: str) -> int:
    return int(digits[:640])  # still out of every range


def _parse_line(line: bytes, ended: bool, max_record_bytes: int, total: Total, where: str) -> Any:
    try:
        text = line.decode("utf-8")
        total.add_items(checked_items(text, max_record_bytes, where), where)
        return parse_json(text, where)
    except UnicodeDecodeError as error:
        code, why = "MM001", f"is not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        bom = " (the file starts with a byte order mark)" if line[:3] == b"\xef\xbb\xbf" else ""
        code, why = "MM001", f"is not JSON at column {error.colno}: {error.msg}{bom}"
    if not ended and line.lstrip()[:1] == b"{":
        code, why = "MM002", "is the last and was cut off"
    raise trace_error(where, why, code)


def _lines(chunks: Iterable[bytes], limit: int, path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number, line, whether a newline ended it), blank lines left out.

    Holds at most `limit` bytes and a chunk. Blank lines count too, so that no file is endless.
    """
    number, blank = 1, 0
    held = bytearray()

    def check_size(size: int) -> None:
        if size > limit:
            raise trace_error(f"{path}: record {number}", f"is larger than {limit} bytes", "MM010")

    for chunk in chunks:
        start = 0
        if not held and (run := BLANK_LINES.match(chunk)):
            start = run.end()
            number, blank = number + chunk.count(b"\n", 0, start), blank + start
            check_size(blank)
        while (end := chunk.find(b"\n", start)) >= 0:
            check_size(len(held) + end - start + blank)
            held += chunk[start:end]
            if held and not held.isspace():
                yield number, bytes(held), True
                blank = 0
            else:
                blank += len(held) + 1
            held.clear()
            number, start = number + 1, end + 1
        check_size(len(held) + len(chunk) - start)
        held += chunk[start:]
    if held and not held.isspace():
        yield number, bytes(held), False


def _zstd_chunks(file: IO[bytes], path: Path, total: Total) -> Iterator[bytes]:
    """Decompressed bytes of all frames of `file`, at most 32 MiB at a time."""
    zstandard = require("zstandard", "zstd", "read_trace of a .zst file")
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame = decompressor.decompressobj()
    data = b""
    try:
        while data := data or file.read(ZSTD_READ_BYTES):
            if frame.eof:
                frame = decompressor.decompressobj()
            chunk = frame.decompress(data)
            total.add(len(chunk), f"{path}")
            yield chunk
            data = frame.unused_data
    except zstandard.ZstdError as error:
        raise trace_error(f"{path}", f"is not a whole zstd file: {error}", "MM001") from None
    if not frame.eof:
        raise trace_error(f"{path}", "ends within a zstd frame", "MM002")
