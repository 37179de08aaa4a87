"""Files that are written whole or not at all, and never over an input of the command; and read up to a limit."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mmpack.errors import ArgumentError, MmpackError

if os.name == "posix":
    import fcntl

NAMED = 48  # characters of the file's own name in that of the file beside it
FIXES = {
    errno.ENOSPC: "make room on that disk, or name another",
    errno.EDQUOT: "make room in that quota, or name another disk",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or write less",
    errno.EIO: "name another disk",
}

Identity = tuple[int, int]  # device and inode: the same by every name and link


class _Command:
    """The files that a running command has read and written."""

    def __init__(self, read: Mapping[Identity, str]):
        self.read = dict(read)
        self.written: dict[str, str] = {}  # a file -> what wrote it


_command: _Command | None = None  # of this process; None outside a command


@contextmanager
def inputs_kept(read: Mapping[Identity, str]) -> Iterator[None]:
    """Make `replaced` and `write_text` refuse every file of `read`, and what `reading` adds, within the block.

    Args: `read`: files by identity, with what they are in words.
    """
    global _command
    before, _command = _command, _Command(read)
    try:
        yield
    finally:
        _command = before


def reading(path: Path, what: str) -> None:
    """Note a file that the running command reads, so that it doesn't overwrite it."""
    if _command is not None and (found := identity(path)) is not None:
        _command.read.setdefault(found, what)


def identity(path: Path) -> Identity | None:
    """Device and inode of the regular file that `path` leads to; None if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a NUL in the name
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _opened(handle: int) -> Identity | None:
    with suppress(OSError):
        found = os.fstat(handle)
        return (found.st_dev, found.st_ino)
    return None


def _refuse_input(path: Path, what: str, error: type[MmpackError]) -> None:
    if _command is None:
        return
    found, target = identity(path), os.path.realpath(path)
    if found is not None and found in map(_opened, (1, 2)):
        about = "is the file that this command prints to"
    elif found in _command.read:
        about = f"is {_command.read[found]}, which this command reads"
    elif _command.written.setdefault(target, what) != what:
        about = "was written by this command a moment ago"
    else:
        return
    raise error(f"{what}: {str(path)!r:.120} {about}. Fix: write to another file")


@contextmanager
def replaced(
    path: Path, what: str, error: type[MmpackError] | None, durable: bool = True
) -> Iterator[IO[bytes]]:
    """A file to write in: it takes the place of `path` in one step, or `path` stays as it was.

    Links are followed, and the mode of a file that is replaced is kept. Files that killed writers left beside `path`
    are removed; a live writer holds a lock on its own. `durable`: wait until the disk has it. Raises: `error`, one
    line that begins with `what`, for a folder or disk that can't be written to (OSError if `error` is None). Other
    errors of the writer pass. `inputs_kept`: refuses inputs of a command, by `error` too.
    """
    with _failing(what, path, error):
        old = _mode(path)
        if old is not None and not stat.S_ISREG(old):
            kind = "a folder" if stat.S_ISDIR(old) else "not a file"
            raise (error or OSError)(f"{what}: {path} is {kind}. Fix: name a file")
        _refuse_input(path, what, error or ArgumentError)
        target = Path(os.path.realpath(path))
        _remove_leftovers(target)
        temporary, file = _locked_beside(target)
    try:
        try:
            yield _Guarded(file, what, path, error)  # type: ignore[misc]
            with _failing(what, path, error):
                if old is not None:
                    os.chmod(temporary, stat.S_IMODE(old))
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                if os.name != "posix":  # which moves no file that is open
                    file.close()
                os.replace(temporary, target)  # before the lock goes
        finally:
            with suppress(OSError):  # of bytes that could not be written: raised before
                file.close()
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        with _failing(what, path, error):
            _sync_folder(target.parent)


def _mode(path: Path) -> int | None:
    """Return the mode of the file that `path` leads to; None if there is none. Raises OSError."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def read_bounded(path: Path, most: int, look: Callable[[IO[bytes]], object] | None = None) -> bytes:
    """The bytes of a file of at most so many, after a `look` at its head. Raises OSError, and what `look` does."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would wait, a device never ends
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most}", str(path))
        if look is not None:
            look(file)
            file.seek(0)
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it grew beyond {most} bytes", str(path))
    return data


class _Guarded:
    """A file whose own errors become one line; other errors of the writer pass."""

    def __init__(self, file: IO[bytes], what: str, path: Path, error: type[MmpackError] | None):
        self._file = file
        self._about = (what, path, error)
        self.closed = False

    def write(self, data: Any) -> int:
        with _failing(*self._about):
            return self._file.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with _failing(*self._about):
            self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


@contextmanager
def _failing(what: str, path: Path, error: type[MmpackError] | None) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if error is None:
            raise
        why = e.strerror or " ".join(str(e).split())[:200]
        fix = FIXES.get(e.errno or 0, "name a folder that can be written to")
        raise error(f"{what}: {path} can't be written ({why}). Fix: {fix}") from None


def _locked_beside(target: Path) -> tuple[Path, IO[bytes]]:
    """Open a new file in the folder of `target`, with a lock that ends with its process."""
    while True:
        temporary = target.with_name(f".{target.name[:NAMED]}.{secrets.token_hex(8)}.tmp")
        file = temporary.open("xb")
        try:
            _lock(file, wait=True)
            if temporary.exists():  # else another process removed it before it was locked
                return temporary, file
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        file.close()


def _remove_leftovers(target: Path) -> None:
    """Delete files that writers of `target` left, those that no process holds a lock on."""
    if os.name != "posix":
        return
    pattern = re.compile(re.escape(f".{target.name[:NAMED]}.") + r"(?:[0-9a-f]{8}){1,2}\.tmp")
    with os.scandir(target.parent) as entries:
        found = [e.path for e in entries if pattern.fullmatch(e.name)]
    for path in found:
        with suppress(OSError):  # of another user, or gone already
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                if stat.S_ISREG(os.fstat(handle).st_mode) and _lock(file, wait=False):
                    os.unlink(path)


def _lock(file: IO[bytes], wait: bool) -> bool:
    """Take the lock; return whether it is ours. On a disk without locks it never is: then nothing is removed there."""
    if os.name != "posix":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, where folders can be opened (not on Windows)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: whole, or the old one stays. Devices, pipes and stdout's own file are written to."""
    if path.exists() and path.is_file() and identity(path) == _opened(1):
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        return
    if path.exists() and not path.is_file():
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except BrokenPipeError:
            raise
        except OSError as error:
            why = f"can't be written ({error.strerror})"
            raise ArgumentError(f"output: {path} {why}. Fix: name a file") from None
        return
    with replaced(path, "output", ArgumentError) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
