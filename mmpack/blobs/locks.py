"""Locks that die with their process: shared and exclusive ones, on the numbers of one file, by the kernel.

A number stands for a key. Whatever ends a process ends its locks, so no list of process ids is kept, and none can be
stale. Locks are those of Linux' open file descriptions: two of them in one process are strangers to each other.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmpack.errors import BackendError

try:
    import fcntl

    _NOW, _WAIT = fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW
except (ImportError, AttributeError):  # not Linux
    fcntl = None  # type: ignore[assignment]


class Locks:
    """Locks on the numbers 0 to 2^62 of the file `path`, which is made if it is missing.

    `share` is counted in this process: what was shared twice is released twice. A fork shares nothing of its parent's.
    Raises: BackendError on systems without such locks; OSError.
    """

    def __init__(self, path: Path):
        if fcntl is None:
            raise BackendError(
                "mmpack.blobs: locks on open files exist on Linux only. "
                "Fix: run on Linux, or leave pixels in the samples"
            )
        self.path = path
        self._guard = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._shared: Counter[int] = Counter()
        self._pid = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        self._other = os.open(self.path, flags, 0o600)  # meets our own shared locks, too

    def _ours(self) -> None:
        """Open files of its own in a fork; the parent's stay the parent's, though the fork has them open."""
        if self._pid != os.getpid():
            os.close(self._file)
            os.close(self._other)
            self._guard = threading.Lock()
            self._open()

    def share(self, number: int) -> None:
        """Hold a shared lock; waits for an exclusive one to end."""
        self._ours()
        with self._guard:
            if not self._shared[number]:
                _set(self._file, fcntl.F_RDLCK, number, wait=True)
            self._shared[number] += 1

    def release(self, number: int) -> bool:
        """Give one `share` back. False if there was none."""
        self._ours()
        with self._guard:
            if not self._shared[number]:
                return False
            self._shared[number] -= 1
            if not self._shared[number]:
                del self._shared[number]
                _set(self._file, fcntl.F_UNLCK, number, wait=True)
            return True

    @contextmanager
    def alone(self, number: int, wait: bool) -> Iterator[bool]:
        """Yield whether the exclusive lock is ours: then nobody shares the number, this process included.

        `wait`: until it is. A process's threads must not wait for each other's: they have one lock.
        """
        self._ours()
        got = _set(self._other, fcntl.F_WRLCK, number, wait)
        try:
            yield got
        finally:
            if got:
                _set(self._other, fcntl.F_UNLCK, number, wait=True)

    def close(self) -> None:
        """Release everything. A fork's copy of the files is closed with the fork."""
        if self._file >= 0:
            os.close(self._file)
            os.close(self._other)
        self._file = self._other = -1
        self._shared.clear()


def _set(file: int, kind: int, number: int, wait: bool) -> bool:
    """Set a lock on one number; False if it is another's and there was no waiting. Raises OSError."""
    wanted = struct.pack("hhqqi0q", kind, os.SEEK_SET, number, 1, 0)
    while True:
        try:
            fcntl.fcntl(file, _WAIT if wait else _NOW, wanted)
        except OSError as error:
            if wait or error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True
