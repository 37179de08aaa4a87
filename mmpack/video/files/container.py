"""A video file, opened by PyAV: the only place that opens one. Every failure is a named error of one line."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, MmpackError, VideoError, require
from mmpack.video.files.header import ASF, MP4_STARTS, check_header, ts_packet
from mmpack.video.limits import Limits

Source = bytes | bytearray | memoryview | str | os.PathLike[str]
IN_MEMORY = (bytes, bytearray, memoryview)

# Formats that hold their frames themselves. Playlists and others name further files, which FFmpeg would open.
FORMATS = (
    "mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "flv", "mpegts", "ogg", "asf", "ivf"
)  # fmt: skip
SUPPORTED = "MP4, QuickTime, Matroska, WebM, AVI, FLV, MPEG-TS, Ogg, ASF or IVF"
_STARTS = (b"\x1a\x45\xdf\xa3", b"FLV", b"OggS", ASF, b"DKIF")
MAX_STREAMS = 64
UNCHECKED = ("hevc",)  # FFmpeg gives pictures of damaged ones and reports nothing
# With more threads damaged ones give other pictures; HEVC does so at each call.
ONE_THREAD = ("hevc", "vp8", "mpeg1video", "mpeg2video")
UNCUT = ("mpegts", "h264")  # packets of no stated size: threads may hide that the last one is cut
FLV = b"FLV"  # has no streams yet when it is opened, so none to give options to


class Opened(NamedTuple):
    container: Any  # av.container.InputContainer
    stream: Any  # av.VideoStream, its decoder not yet open
    where: str


@contextmanager
def opened(source: Source, limits: Limits, threads: int = 1) -> Iterator[Opened]:
    """The container and its video stream, headers checked; both are closed at the end.

    Raises: ArgumentError (a source that can't be read), VideoError, MissingExtraError without PyAV.
    """
    av = require("av", "video", "reading a video")
    where = name_of_source(source)
    with open_file(source) as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            raise VideoError(f"{where} is empty. Fix: pass a video file")
        check_header(file, size, limits.max_frames, where)
        file.seek(0)
        head = file.read(256)
        bounded = head[:3] != FLV
        file.seek(0)
        fix = (
            "pass a whole video file"
            if _is_supported(head)
            else f"pass a whole file of {SUPPORTED}"
        )
        with reading(where, fix):
            container = av.open(
                file if isinstance(source, IN_MEMORY) else f"file:{os.fspath(source)}",
                options={"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "file"},
                stream_options=[{"max_pixels": str(limits.max_pixels)}] * MAX_STREAMS * bounded,
                metadata_errors="replace",
            )
        with container, reading(where):
            yield Opened(container, _video_stream(container, limits, threads, where), where)


def content_key(source: Source) -> str:
    """sha256 hex of the file's bytes. Raises: ArgumentError (a path that can't be read)."""
    with open_file(source) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@contextmanager
def open_file(source: Source) -> Iterator[BinaryIO]:
    """Bytes, or the file at a path, to read from. Raises: ArgumentError."""
    if isinstance(source, IN_MEMORY):
        yield io.BytesIO(source)
        return
    where = name_of_source(source)
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):  # reading a pipe would wait
            raise ArgumentError(
                f"{where} is not a file (a folder, a pipe or a device). Fix: pass a file, or its bytes"
            )
        file = Path(source).open("rb")  # noqa: SIM115  (closed below; errors of its reader are not of opening)
    except ArgumentError:
        raise
    except (OSError, ValueError) as error:  # a NUL in the name
        why = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise ArgumentError(
            f"{where} can't be read ({why}). Fix: check the path and its permissions"
        ) from None
    with file:
        yield file


def name_of_source(source: Source) -> str:
    """`source` in an error message."""
    if isinstance(source, IN_MEMORY):
        return f"video ({len(source)} bytes)"
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(
            f"video: {type(source).__name__} is not a video. Fix: pass the bytes of a file, or its path"
        )
    return f"video {os.path.basename(os.fspath(source))[-80:]!a}"


@contextmanager
def reading(where: str, fix: str = "pass a whole video file") -> Iterator[None]:
    """What FFmpeg raises over a broken file becomes a VideoError."""
    av = require("av", "video", where)
    # ValueError: PyAV's, of a file without streams
    errors = (av.FFmpegError, MemoryError, ValueError)
    try:
        yield
    except MmpackError:
        raise
    except errors as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise VideoError(
            f"{where} can't be read ({' '.join(why.split())[:200]}). Fix: {fix}"
        ) from None


def _is_supported(head: bytes) -> bool:
    """Does a file begin as one of `SUPPORTED`?"""
    avi = head[:4] == b"RIFF" and head[8:11] == b"AVI"
    return bool(ts_packet(head)) or avi or head[4:8] in MP4_STARTS or head.startswith(_STARTS)


def _video_stream(container: Any, limits: Limits, threads: int, where: str) -> Any:
    stream = container.streams.best("video")
    if stream is None or stream.disposition & 0x400:  # the cover picture of an audio file
        kinds = sorted({s.type for s in container.streams})
        raise VideoError(
            f"{where} holds no video stream, only: {', '.join(kinds) or 'nothing'}. "
            "Fix: pass a file with a video stream"
        )
    context = stream.codec_context
    if context is None:
        raise VideoError(
            f"{where}: there is no decoder for its codec. Fix: encode it as H.264, HEVC, VP9 or AV1"
        )
    if context.width * context.height > limits.max_pixels:
        raise VideoError(
            f"{where}: frames of {context.width}×{context.height}, more than {limits.max_pixels} pixels. "
            "Fix: pass a smaller video, or Limits(max_pixels=…)"
        )
    context.options = {"max_pixels": str(limits.max_pixels)}
    if context.codec.canonical_name in UNCHECKED:
        context.options |= {"err_detect": "explode"}
    kind = container.format.name, context.codec.canonical_name
    if kind[1] in ONE_THREAD or kind == UNCUT:
        threads = 1
    context.thread_count = threads
    context.thread_type = "AUTO" if threads > 1 else "NONE"
    return stream


def rotation_of(picture: Any, where: str) -> int:
    """Degrees clockwise (0, 90, 180 or 270) that turn `picture` (av.VideoFrame) upright.

    Raises: VideoError where its matrix mirrors, skews, or turns by another angle.
    """
    matrix = picture.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0
    a, b, _, c, d, *_ = np.frombuffer(bytes(matrix), "<i4").tolist()
    if a * d - b * c <= 0 or (a and b) or (c and d):
        raise VideoError(
            f"{where}: its display matrix mirrors or skews the frames. Fix: encode the frames as they should be seen"
        )
    return -int(picture.rotation) % 360
