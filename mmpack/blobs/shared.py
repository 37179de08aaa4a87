"""Blobs in the shared memory of a node: a folder in /dev/shm that goes with the last process that uses it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmpack.blobs import janitor
from mmpack.blobs.folder import BlobFolder
from mmpack.errors import ArgumentError, BlobError, check_whole

ROOT = "/dev/shm"


class SharedBlobs(BlobFolder):
    """cache key -> pixels [patches, patch_dim], once in the memory of a node: see `BlobFolder`.

    Args:
        max_bytes: of all media. Memory is taken as media come.
        name: processes that give one name, such as the ranks of a node, share one store; the first one makes it. None:
            a store of its own, for processes that the object is sent to.
        source: see `BlobFolder`.
        root: a folder in memory (tmpfs).

    When the last process that uses it has ended or called `close`, its memory is free again: a small process waits for
    that, and outlives a SIGKILL of all others. If it is killed too, the next store of this user on the node cleans up.
    The folder is open to this user only. Raises: ArgumentError, also where `root` has less room than `max_bytes`, and
    for a folder that another account has made.
    """

    def __init__(
        self,
        max_bytes: int,
        name: str | None = None,
        source: Mapping[str, Any] | None = None,
        root: str | os.PathLike[str] = ROOT,
    ):
        check_whole("SharedBlobs", "max_bytes", max_bytes)
        if name is not None and not re.fullmatch(r"[\w-]{1,100}", name):
            raise ArgumentError(
                f"SharedBlobs: name is {name!r:.60}. Fix: use letters, digits, - and _, at most 100"
            )
        _check_room(root, max_bytes)
        begin = f"mmpack-{os.getuid()}-"
        _sweep(Path(root), begin)
        self._use(Path(root) / (begin + (name or secrets.token_hex(8))), max_bytes, source, True)

    def _use(
        self, folder: Path, max_bytes: int, source: Mapping[str, Any] | None, make: bool
    ) -> None:
        while True:
            made = False
            if make:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(0o700)
                    made = True
            try:
                users = _opened_users(folder, os.O_CREAT if make else 0)
            except FileNotFoundError:
                if make:  # it was removed just now
                    continue
                raise BlobError(
                    f"SharedBlobs: {folder} went away with the last process that used it (MM404). "
                    "Fix: keep the store open where it was made until it is open here",
                    "MM404",
                ) from None
            if janitor.is_users(str(folder), users):
                break
            os.close(users)
        self._users: int | None = users
        if made:
            command = [sys.executable, "-I", "-S", janitor.__file__, str(folder)]
            quiet = subprocess.DEVNULL
            subprocess.run(command, check=True, stdin=quiet, stdout=quiet, stderr=quiet)
        super().__init__(folder, max_bytes, source)

    def close(self) -> None:
        """Use it no more. The last process's close frees the memory, but for arrays that are still in use."""
        if self._users is None:
            return
        super().close()
        os.close(self._users)
        self._users = None
        janitor.removed_if_unused(str(self.folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self.max_bytes, self.source)


def _opened_users(folder: Path, flags: int) -> int:
    """The file whose shared lock says that this process uses `folder`. Raises: FileNotFoundError; ArgumentError."""
    if not janitor.is_ours(str(folder)):
        raise ArgumentError(
            f"SharedBlobs: {folder} is not a folder of this user alone: another account may have made it. "
            "Fix: remove it, or pass another name="
        )
    users = os.open(folder / janitor.USERS, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    if not janitor.shared(users):
        os.close(users)
        raise ArgumentError(
            f"SharedBlobs: {folder} has been locked for {janitor.SECONDS} s by a process that removes it. "
            "Fix: end that process, or pass another name="
        )
    return users


def _opened(folder: Path, max_bytes: int, source: Mapping[str, Any] | None) -> SharedBlobs:
    """The store of `folder`, in another process. Raises: BlobError (MM404) if it is gone."""
    store = SharedBlobs.__new__(SharedBlobs)
    store._use(folder, max_bytes, source, make=False)
    return store


def _check_room(root: str | os.PathLike[str], max_bytes: int) -> None:
    try:
        room, mode = os.statvfs(root), os.stat(root).st_mode
    except OSError as error:
        raise ArgumentError(
            f"SharedBlobs: {root} can't be used ({error.strerror}). "
            "Fix: pass a folder in memory as root=, or use BlobFolder"
        ) from None
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ArgumentError(
            f"SharedBlobs: every account can replace what is in {root}: it lacks the sticky bit. "
            f"Fix: chmod +t {root}, or pass a folder of this user's as root="
        )
    if room.f_bavail * room.f_frsize < max_bytes:
        raise ArgumentError(
            f"SharedBlobs: {root} has room for {room.f_bavail * room.f_frsize} bytes, but max_bytes is {max_bytes}. "
            "Fix: pass a smaller max_bytes, or give more shared memory (--shm-size of docker)"
        )


def _sweep(root: Path, begin: str) -> None:
    """Remove what killed runs of this user left, janitor and all."""
    for entry in os.scandir(root):
        with contextlib.suppress(FileNotFoundError):
            if not (entry.name.startswith(begin) and janitor.is_ours(entry.path)):
                continue
        if entry.name.endswith(janitor.GONE):  # whoever removed it was killed over it
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            janitor.removed_if_unused(entry.path)
