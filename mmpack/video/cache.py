"""Decoded frames on disk, shared by processes: one file per (video, frames), named by its key.

A file is a line of JSON (shape, checksum), then the pixels. It is written beside its place and moved there whole. Of
the processes that miss the same frames one decodes, and the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmpack.errors import ArgumentError, UnwrittenWarning
from mmpack.files import replaced
from mmpack.video.values import read_value

HEAD_BYTES = 256
LEFTOVER_SECONDS = 3600.0  # a half-written file this old belongs to a process that died


@dataclass
class CacheStats:
    """What this object was asked, in this process."""

    hits: int = 0
    misses: int = 0
    broken: int = 0  # misses where the file had changed since it was written
    evicted: int = 0
    unwritten: int = 0  # frames handed out that could not be kept, e.g. on a full disk


def frames_key(content_key: str, indices: np.ndarray, decoder: str) -> str:
    """sha256 hex over the video's own key, the decoder's name and version, and the frames, in order."""
    digest = hashlib.sha256(b"mmpack.frames.2\0" + bytes.fromhex(content_key))
    digest.update(decoder.encode() + b"\0")
    digest.update(np.ascontiguousarray(indices, "<i8").data)
    return digest.hexdigest()


class FrameCache:
    """At most `max_bytes` of decoded frames in `folder`; the least recently used go first.

    Processes that share a folder share its frames. Frames that can't be kept (a full disk) are handed out all the same:
    a warning says so once, and `stats.unwritten` counts them. Raises: ArgumentError for a folder that can't be made.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        if not isinstance(folder, str | os.PathLike):
            raise ArgumentError(f"FrameCache: folder is {folder!r:.60}. Fix: pass a path")
        max_bytes = read_value("FrameCache: max_bytes", "int", max_bytes, "a positive number")
        if max_bytes <= 0:
            raise ArgumentError(
                f"FrameCache: max_bytes is {max_bytes}. Fix: pass a positive number"
            )
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.stats = CacheStats()
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"FrameCache: can't write to {str(self.folder)[-80:]!a} ({error.strerror}). "
                "Fix: pass a folder that is writable and has room"
            ) from None

    def frames(self, key: str, decode: Callable[[], np.ndarray]) -> np.ndarray:
        """uint8 [n, h, w, 3] of `key` (sha256 hex): from the disk, or from `decode`, whose errors pass."""
        path = self.folder / f"{key}.frames"
        found = _read(path)
        if found is None:
            with self._locked(key[:2]):
                found = _read(path)  # another process may have written it meanwhile
                if found is None:
                    self.stats.misses += 1
                    self.stats.broken += path.exists()
                    return self._written(path, decode())
        self.stats.hits += 1
        return found

    def _written(self, path: Path, pixels: np.ndarray) -> np.ndarray:
        pixels = np.ascontiguousarray(pixels)
        if HEAD_BYTES + pixels.nbytes > self.max_bytes:
            return pixels
        try:
            self._write(path, pixels)
            with self._locked("evict"):
                self._evict(kept=path.name)
        except OSError as error:
            self._warn(error)
        return pixels

    def _write(self, path: Path, pixels: np.ndarray) -> None:
        """Whole, or not at all. Raises OSError."""
        with replaced(path, "FrameCache", None, durable=False) as file:
            file.write(_head(path.stem, pixels))
            file.write(pixels.data)

    def _warn(self, error: OSError) -> None:
        self.stats.unwritten += 1
        if self.stats.unwritten == 1:
            warnings.warn(
                f"FrameCache: can't write to {str(self.folder)[-80:]!a} ({error.strerror}), so frames are "
                "decoded each time. Fix: make room, or use another folder",
                UnwrittenWarning,
                stacklevel=2,
            )

    def _evict(self, kept: str) -> None:
        """Remove the oldest but `kept` until the rest fits."""
        entries = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # a process has just moved its part to its place
                status = entry.stat()
                if entry.name.endswith(".frames"):
                    entries.append(
                        (entry.name == kept, status.st_mtime_ns, status.st_size, entry.path)
                    )
                elif entry.is_file() and time.time() - status.st_mtime > LEFTOVER_SECONDS:
                    os.unlink(entry.path)
        held = sum(size for _, _, size, _ in entries)
        for _, _, size, path in sorted(entries):
            if held <= self.max_bytes:
                return
            os.unlink(path)
            held -= size
            self.stats.evicted += 1

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """No other process or thread holds the lock of that name. The system frees it if its holder dies."""
        try:
            file = (self.folder / "locks" / name).open("wb")
        except OSError:  # a full disk: the next write reports it
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _read(path: Path) -> np.ndarray | None:
    """The frames in the file; None if there is none, or it is not as it was written."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArgumentError(
            f"FrameCache: can't read {str(path)[-80:]!a} ({error.strerror}). Fix: remove the file"
        ) from None
    with file:
        head = _parsed(file.read(HEAD_BYTES))
        if head is None or os.fstat(file.fileno()).st_size != HEAD_BYTES + math.prod(head[0]):
            return None
        pixels = np.empty(head[0], np.uint8)
        file.readinto(pixels.data.cast("B"))
        os.utime(file.fileno())
    return pixels if zlib.crc32(pixels.data, zlib.crc32(path.stem.encode())) == head[1] else None


def _head(key: str, pixels: np.ndarray) -> bytes:
    """HEAD_BYTES of JSON. The checksum is over the key too: a file under another name is a broken one."""
    checksum = zlib.crc32(pixels.data, zlib.crc32(key.encode()))
    head = json.dumps({"frames": 1, "shape": pixels.shape, "crc32": checksum})
    return head.encode().ljust(HEAD_BYTES - 1) + b"\n"


def _parsed(head: bytes) -> tuple[tuple[int, ...], int] | None:
    """(shape, checksum), or None where `head` is not one."""
    try:
        fields = json.loads(head)
        shape, checksum = tuple(fields["shape"]), fields["crc32"]
    except (ValueError, KeyError, TypeError):
        return None
    whole = len(shape) == 4 and all(type(n) is int and n > 0 for n in shape)
    return (shape, checksum) if whole else None
