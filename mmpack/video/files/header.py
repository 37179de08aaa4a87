"""What the outermost structure of a file claims, read before a demuxer trusts it.

FFmpeg's MP4 demuxer makes one index entry per frame that a table counts, and repeats the entries for each edit; a table
can count billions of frames in a few bytes. FFmpeg also reads a file that was cut as if it were a shorter one. Nothing
marks the end of MPEG-TS and IVF, nor of what was streamed, so a cut between two of their packets can't be known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from mmpack.audio.whole import ogg_ends
from mmpack.errors import VideoError

MP4_STARTS = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide")
MP4_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"mvex", b"moof", b"traf")
TABLES = {
    b"stts": 8,
    b"ctts": 8,
    b"stsc": 12,
    b"stco": 4,
    b"co64": 8,
    b"stss": 4,
}  # bytes per entry
MAX_BOXES = 1 << 20
AUDIO_FRAMES = 160  # fewest samples of uncompressed audio that FFmpeg puts into one packet
AUDIO_PACKETS = 16  # per frame that is allowed

EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
ASF = b"\x30\x26\xb2\x75"
STREAMED = b"\xff" * 4  # the length of an AVI whose writer could not go back
SYNC = 0x47  # begins each packet of MPEG-TS
TS_PACKETS = (
    (0, 188),
    (4, 192),
)  # where it lies and the packet's bytes: plain, and with a time in front


def check_header(file: BinaryIO, size: int, max_frames: int, where: str) -> None:
    """Check a file of `size` bytes: MP4, Matroska, AVI, ASF, Ogg, MPEG-TS and FLV.

    Raises: VideoError where tables count more than `max_frames`, or the file ends before its last box, page or packet.
    """
    file.seek(0)
    head = file.read(256)
    if head[4:8] in MP4_STARTS:
        _check_mp4(file, size, max_frames, where)
    elif head[:4] == EBML:
        _check_matroska(file, size, where)
    elif head[:4] == b"RIFF":
        _check_riff(file, size, where)
    elif head[:4] == ASF:
        header = int.from_bytes(head[16:24], "little")
        _check_end(header + 24, size, where)  # where its data's own length stands
        file.seek(header + 16)
        _check_end(header + int.from_bytes(file.read(8), "little"), size, where)
    elif head[:4] == b"OggS" and not ogg_ends(file):
        raise _cut(where, "a stream's last page has no end-of-stream flag")
    elif head[:3] == b"FLV":
        if not _ends_with_tag(file, size):
            raise _cut(where, "it ends within a tag")
        _check_end(_flv_size(file), size, where)
    elif (packet := ts_packet(head)) and size % packet:
        raise _cut(where, f"it ends within a packet of {packet} bytes")


def _check_riff(file: BinaryIO, size: int, where: str) -> None:
    """Each part of an AVI must end within the file; beyond 1 GB there are several."""
    at = 0
    for _ in range(MAX_BOXES):
        file.seek(at)
        head = file.read(8)
        if head[:4] != b"RIFF" or head[4:] == STREAMED:
            return
        at += 8 + int.from_bytes(head[4:], "little")
        _check_end(at, size, where)


def ts_packet(head: bytes) -> int:
    """Bytes per packet of an MPEG-TS file that begins so; 0 of another file."""
    return next(
        (n for at, n in TS_PACKETS if len(head) > at + n and head[at] == head[at + n] == SYNC), 0
    )


def _ends_with_tag(file: BinaryIO, size: int) -> bool:
    """Do the last four bytes of an FLV count the bytes of the tag before them?"""
    file.seek(max(0, size - 4))
    counted = int.from_bytes(file.read(4))
    file.seek(max(0, size - 4 - counted) + 1)
    return counted == 11 + int.from_bytes(file.read(3))


def _flv_size(file: BinaryIO) -> int:
    """Bytes of the whole FLV, as its metadata say; 0 where they don't, or it was streamed."""
    file.seek(0)
    value = file.read(4096).partition(b"filesize\0")[2][:8]  # a float64
    size = struct.unpack(">d", value)[0] if len(value) == 8 else 0.0
    return int(size) if 0 < size < 2**53 else 0


class _Box(NamedTuple):
    kind: bytes
    body: int  # offsets in the file
    end: int


def _check_mp4(file: BinaryIO, size: int, max_frames: int, where: str) -> None:
    tables: dict[bytes, np.ndarray] = {}  # of one track
    samples = fragmented = 0
    for box in _boxes(file, size, where):
        if box.kind == b"trak":
            _check_track(samples, tables, max_frames, where)
            samples, tables = 0, {}
        elif box.kind == b"cmov":
            raise VideoError(
                f"{where}: its header is compressed. Fix: remux it, e.g. with ffmpeg -c copy"
            )
        elif box.kind == b"stsz":
            samples = int.from_bytes(_read(file, box, 12)[8:12])
        elif box.kind == b"trun":
            fragmented += int.from_bytes(_read(file, box, 8)[4:8])
            _check_count(fragmented, max_frames, where)
        elif box.kind in TABLES or box.kind == b"elst":
            tables[box.kind] = _table(file, box, where)
    _check_track(samples, tables, max_frames, where)


def _check_track(
    samples: int, tables: dict[bytes, np.ndarray], max_frames: int, where: str
) -> None:
    """A track makes as many index entries as its tables count, or as its chunks hold if it is uncompressed audio."""
    times = tables.get(b"stts", np.zeros((0, 2), np.int64))
    if len(times) == 1 and times[0, 1] == 1:
        chunks = max(len(tables.get(kind, ())) for kind in (b"stco", b"co64"))
        largest = int(tables[b"stsc"][:, 1].max()) if len(tables.get(b"stsc", ())) else 0
        _check_count(chunks * largest // AUDIO_FRAMES, max_frames * AUDIO_PACKETS, where)
        return
    counts = [int(tables[kind][:, 0].sum()) for kind in (b"stts", b"ctts") if kind in tables]
    edits = len(tables.get(b"elst", ()))
    _check_count(max([samples, *counts]) * max(edits - 1, 1), max_frames, where)


def _boxes(file: BinaryIO, size: int, where: str) -> Iterator[_Box]:
    """Each box of an MP4 file, parents first."""
    open_ends, at = [size], 0
    for _ in range(MAX_BOXES):
        while open_ends and at >= open_ends[-1]:
            open_ends.pop()
        if not open_ends:
            return
        file.seek(at)
        head = file.read(16)
        length, kind, body = int.from_bytes(head[:4]), head[4:8], at + 8
        if length == 1:
            length, body = int.from_bytes(head[8:16]), at + 16
        end = at + length if length else open_ends[-1]
        if len(open_ends) == 1 and kind in MP4_STARTS:
            _check_end(end, size, where)
        if len(head) < 8 or end < body or end > open_ends[-1]:
            at = open_ends[-1]  # no box: what is left is padding, or for the demuxer to judge
            continue
        yield _Box(kind, body, end)
        if kind in MP4_PARENTS:
            open_ends.append(end)
        at = body if kind in MP4_PARENTS else end
    raise VideoError(
        f"{where}: more than {MAX_BOXES} boxes. Fix: remux it, e.g. with ffmpeg -c copy"
    )


def _table(file: BinaryIO, box: _Box, where: str) -> np.ndarray:
    """int64 [entries, 32-bit columns] of a box that counts its entries."""
    head = _read(file, box, 8)
    width = TABLES.get(box.kind) or (20 if head[:1] == b"\x01" else 12)
    count = int.from_bytes(head[4:8])
    if count * width > box.end - box.body - 8:
        raise VideoError(
            f"{where}: its table {box.kind.decode()} counts {count} entries, more than it holds. "
            "Fix: pass a whole, undamaged file"
        )
    entries = np.frombuffer(file.read(count * width), ">u4")
    return entries.reshape(count, width // 4).astype(np.int64)


def _read(file: BinaryIO, box: _Box, count: int) -> bytes:
    file.seek(box.body)
    return file.read(min(count, box.end - box.body))


def _check_matroska(file: BinaryIO, size: int, where: str) -> None:
    """An element must end within the file; one of unknown length (the segment of a stream) consists of others."""
    at = 0
    for _ in range(MAX_BOXES):
        file.seek(at)
        head = file.read(12)
        if not head or head[0] == 0:  # the end, or padding
            return
        _, name = _ebml_size(head, 0)
        length, body = _ebml_size(head, name)
        if length == (1 << 7 * (body - name)) - 1:
            at += body
            continue
        _check_end(at + body + length, size, where)
        if head.startswith(SEGMENT):
            return
        at += body + length


def _ebml_size(head: bytes, at: int) -> tuple[int, int]:
    """A variable-length number at `at`, and the offset behind it."""
    first = head[at] if at < len(head) else 1
    width = 9 - max(first.bit_length(), 1)
    value = int.from_bytes(head[at : at + width]) & ((1 << 7 * width) - 1)
    return value, at + width


def _check_count(count: int, limit: int, where: str) -> None:
    if count > limit:
        raise VideoError(
            f"{where}: its header counts {count} frames, more than {limit}. "
            "Fix: pass a shorter clip, or Limits(max_frames=…)"
        )


def _check_end(end: int, size: int, where: str) -> None:
    if end > size:
        raise _cut(where, f"the file has {size} of {end} bytes")


def _cut(where: str, why: str) -> VideoError:
    return VideoError(
        f"{where}: {why}. Fix: pass the whole file, this one was cut; or write what is there anew, with ffmpeg -i IN "
        "-c copy OUT"
    )
