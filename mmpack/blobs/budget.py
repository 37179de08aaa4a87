"""Budget of a folder of blobs: at most so many bytes; evicts unheld files, least recently used first.

The file `used` counts bytes. It may be too high (of a process that was killed meanwhile), never too low: files have
their whole size before they are counted, and take their names while nobody looks. Who needs more than there is left
looks at all files, and so puts the count right.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmpack.blobs.locks import Locks
from mmpack.errors import BlobError

LOCK = 0  # its number in the folder's locks
DIGITS = 20  # of the count: written in one piece, so that a killed process leaves it whole


class Budget:
    """Byte count of the files below `folder`, in folders of two letters."""

    def __init__(self, folder: Path, max_bytes: int, locks: Locks):
        self.folder, self.max_bytes, self.locks = folder, max_bytes, locks
        self._thread = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from counting in the block."""
        with self._thread, self.locks.alone(LOCK, wait=True):
            yield

    def make_room(self, file: int, size: int) -> None:
        """Give an open file its size, and count it; others go until it fits. Raises: BlobError (MM503) if it does
        not; OSError of a full disk."""
        with self.alone():
            used = self._noted()
            if used + size > self.max_bytes:
                used = self._evict(size)
            if used + size > self.max_bytes:
                self._note(used)
                raise BlobError(
                    f"mmpack.blobs: {size} bytes don't fit: {used} of {self.max_bytes} are in use, all held by "
                    "a process (MM503). Fix: call release() on what was handed over, or raise max_bytes",
                    "MM503",
                )
            os.posix_fallocate(file, 0, size)
            self._note(used + size)

    def recount(self) -> None:
        """Count again, after counted files were removed."""
        with self.alone():
            self._note(sum(size for _, size, _ in self._files()))

    def _noted(self) -> int:
        try:
            return int((self.folder / "used").read_bytes() or b"0")
        except FileNotFoundError:
            return 0

    def _note(self, used: int) -> None:
        file = os.open(self.folder / "used", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, b"%*d" % (DIGITS, used), 0)
        finally:
            os.close(file)

    def _files(self) -> list[tuple[int, int, os.DirEntry[str]]]:
        """Time of last use, size and place of each, half-written ones too; what dead writers left is removed."""
        found = []
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if entry.name.startswith(".") and _left_behind(entry.path):
                        os.unlink(entry.path)
                        continue
                    status = os.stat(entry.path)
                    found.append((status.st_mtime_ns, status.st_size, entry))
        return found

    def _evict(self, size: int) -> int:
        """Remove files until `size` more bytes fit, or only held ones are left; the bytes that there are then."""
        found = self._files()
        used = sum(held for _, held, _ in found)
        for _, held, entry in sorted(found, key=lambda f: f[0]):
            if used + size <= self.max_bytes:
                break
            if entry.name.startswith("."):  # being written
                continue
            with self.locks.alone(int(entry.name[:15], 16) + 1, wait=False) as unheld:
                if unheld:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
                    used -= held
        return used


def _left_behind(path: str) -> bool:
    """Return whether a half-written file is a dead process's: a writer locks its own (`mmpack.files`)."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
