"""Is a file of sound read whole? Compares what its container counts with what is there.

libsndfile reads no further than a header counts, nor beyond the first of several files in one. It reads a file that was
cut as a shorter one, and of an MP3 with a variable bitrate and no Xing header only the part that the bitrate of its
first frame suggests.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

FORMATS = ("WAV", "WAVEX", "RF64", "AIFF", "FLAC", "OGG", "MP3")  # those that are checked
# chunks that may follow the samples, also cut: they hold no sound
_NO_SOUND = (b"LIST", b"id3 ", b"ID3 ", b"bext", b"fact", b"cue ", b"smpl", b"JUNK", b"PAD ")
_FILES = (b"RIFF", b"RIFX", b"RF64", b"FORM")
_FLAC = re.compile(rb"fLaC[\0\x80]\0\0\x22")
_GAPLESS = 2 * 4095  # most samples that an encoder added at both ends, and a decoder leaves out
# kbit/s by index from 1 on: MPEG-1 layers I, II, III; MPEG-2 layer I, layers II and III
_BITRATES = (
    (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


def what_is_missing(
    data: bytes, format: str, claimed: int, read: int, end: int | None = None
) -> str | None:
    """Return what a file lacks, or what of it was not read, as a clause; None if nothing is known to be missing.

    `format`: one of FORMATS. `claimed`, `read`: samples per channel by libsndfile's header (0: it says none), and as
    decoded. `end`: the offset up to which it was read; None: all of it.
    """
    if format == "MP3":
        return _mp3_lacks(data, read)
    if format == "OGG" and not ogg_ends(io.BytesIO(data)):
        return "was cut: its last page has no end-of-stream flag"
    if format not in ("OGG", "FLAC") and (count := _bytes_beyond(data)):
        return f"was cut: it lacks {count} bytes that its header counts"
    if claimed not in (0, read):
        return f"was cut: {read} of the {claimed} samples in its header can be read"
    count = _bytes_unread(data, format, len(data) if end is None else end)
    more = (
        f"holds {count} bytes behind what is read: a second sound, or more than its header counts"
    )
    return more if count else None


class _Page(NamedTuple):
    start: int
    stop: int
    flags: int  # 2: a stream begins, 4: it ends
    stream: bytes


def _pages(file: BinaryIO) -> Iterator[_Page]:
    at = 0
    while True:
        file.seek(at)
        head = file.read(27 + 255)
        if len(head) < 27 or head[:4] != b"OggS":
            return
        start, at = at, at + 27 + head[26] + sum(head[27 : 27 + head[26]])
        yield _Page(start, at, head[5], head[14:18])


def ogg_ends(file: BinaryIO) -> bool:
    """Return whether each stream of an Ogg file ends in a page with the end-of-stream flag (RFC 3533, section 6)."""
    size = file.seek(0, io.SEEK_END)
    ended: dict[bytes, bool] = {}  # by stream: the flag of its last page
    for page in _pages(file):
        if page.stop > size:
            return False
        ended[page.stream] = bool(page.flags & 4)
    return bool(ended) and all(ended.values())


def _bytes_unread(data: bytes, format: str, end: int) -> int:
    """Bytes behind what was read that may hold sound: of further files, or that a header does not count."""
    if data[-128:-125] == b"TAG":  # ID3v1
        data = data[:-128]
    if format == "OGG":
        pages = list(_pages(io.BytesIO(data)))
        first = next((k for k, page in enumerate(pages) if not page.flags & 2), 0)
        chained = (page.start for page in pages[first:] if page.flags & 2)
        return len(data) - next(chained, len(data))
    if format == "FLAC":
        begins = [found.start() for found in _FLAC.finditer(data)]
        rest = data[begins[1] if begins[1:] else end :]
        return len(rest) if rest.strip(b"\0") else 0
    at, size = _samples_at(data)
    at += 0 if size is None else size
    if data[at : at + 1] == b"\0" and at % 2:
        at += 1
    while size is not None and at + 8 <= len(data):
        kind = data[at : at + 4]
        after = at + 8 + int.from_bytes(data[at + 4 : at + 8], _order(data))
        named = all(32 <= byte < 127 for byte in kind) and after <= len(data)
        if kind in _FILES or not (named or kind in _NO_SOUND):
            return len(data) - at
        at = after + after % 2
    return 0


def _bytes_beyond(data: bytes) -> int:
    """Bytes of the samples' chunk (WAV, RF64, AIFF) that lie beyond the file's end."""
    at, size = _samples_at(data)
    return 0 if size is None else max(0, at + size - len(data))


def _order(data: bytes) -> Literal["big", "little"]:
    return "big" if data[:4] in (b"FORM", b"RIFX") else "little"


def _samples_at(data: bytes) -> tuple[int, int | None]:
    """Where the samples' chunk begins, and its bytes by its header; None of a stream, or where there is none."""
    at, long = 12, 0
    while at + 8 <= len(data):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], _order(data))
        at += 8
        if kind == b"ds64":
            long = int.from_bytes(data[at + 8 : at + 16], "little")
        if kind in (b"data", b"SSND"):
            if size == 0xFFFFFFFF:
                size = long
            # of no known length: FFmpeg writes 2³² - 1, others 0 or almost 2³¹
            streamed = 0x7FFF0000 <= size <= 0x80000000
            return at, None if streamed or not size else size
        at += size
        if size % 2 and data[at : at + 1] == b"\0":  # padding, which some leave out
            at += 1
    return at, None


class _Frame(NamedTuple):
    kind: tuple[int, int, int]  # version, layer and rate: equal in all frames of a file
    length: int  # bytes
    samples: int


def _mp3_lacks(data: bytes, read: int) -> str | None:
    at = _next_frame(data, _after_tags(data), None)
    first = None if at is None else _frame(data, at)
    if at is None or first is None:  # a free bitrate, whose frames can't be counted
        return None
    counted = _counted(data[at : at + first.length])
    frames, end = 0, at
    while at is not None:
        found = _frame(data, at)
        if found is None or found.kind != first.kind:
            at = _next_frame(data, at, first.kind)  # behind a tag
            continue
        frames, at = frames + 1, at + found.length
        end = at
    if end > len(data) or (0 < len(data) - end < 4 and data[end] == 0xFF):
        return "was cut: it ends within a frame"
    spare = first.samples
    if counted is not None:
        frames, spare = frames - 1, spare + _GAPLESS  # without the frame that holds the header
        if frames + 1 < counted:  # some encoders count that frame too
            return f"was cut: it has {frames} of the {counted} frames that its header counts"
    if read + spare < frames * first.samples:
        return (
            f"can't be read whole: its frames hold {frames * first.samples} samples, {read} are read, "
            "because no header counts its frames, or counts them wrong"
        )
    return None


def _after_tags(data: bytes) -> int:
    """The offset behind the ID3v2 tags at the start."""
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size + 10 * bool(data[at + 5] & 0x10)
    return at


def _frame(data: bytes, at: int) -> _Frame | None:
    """The frame of MPEG audio whose header is at `at`."""
    if len(data) < at + 4 or data[at] != 0xFF or data[at + 1] < 0xE0:
        return None
    version, layer = data[at + 1] >> 3 & 3, 4 - (data[at + 1] >> 1 & 3)
    bitrate, rate, padding = data[at + 2] >> 4, data[at + 2] >> 2 & 3, data[at + 2] >> 1 & 1
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return None
    table = layer - 1 if version == 3 else 3 + (layer > 1)
    samples = 384 if layer == 1 else 576 if layer == 3 and version != 3 else 1152
    slot = 4 if layer == 1 else 1
    slots = samples // 8 // slot * 1000 * _BITRATES[table][bitrate - 1] // _RATES[version][rate]
    return _Frame((version, layer, rate), slot * (slots + padding), samples)


def _next_frame(data: bytes, at: int, kind: tuple[int, int, int] | None) -> int | None:
    """The offset, from `at` on, of a frame (of `kind`) that another of its kind or the file's end follows."""
    while (at := data.find(b"\xff", at)) >= 0:
        found = _frame(data, at)
        if found is not None and kind in (None, found.kind):
            after = at + found.length
            then = _frame(data, after)
            if after == len(data) or (then is not None and then.kind == found.kind):
                return at
        at += 1
    return None


def _counted(frame: bytes) -> int | None:
    """The frames that a Xing, Info or VBRI header in the first frame counts; None if there is none, or no count."""
    for name in (b"Xing", b"Info"):
        if (at := frame.find(name, 0, 48)) >= 0:
            counts = frame[at + 7 : at + 8] and frame[at + 7] & 1
            return int.from_bytes(frame[at + 8 : at + 12]) if counts else None
    return int.from_bytes(frame[50:54]) if frame[36:40] == b"VBRI" else None
