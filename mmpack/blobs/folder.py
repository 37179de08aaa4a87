"""Blobs in a folder: one file per medium, named by its cache key, read as memory by every process that sees the folder.

A file is written beside its place and moved there whole. Nothing is held by a list: what a process holds are locks,
which end with it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.blobs.blob import KEY, check_key, head_of, parts_of, read_blob, read_head
from mmpack.blobs.locks import Locks
from mmpack.errors import ArgumentError, BlobError, UnwrittenWarning, check_whole
from mmpack.files import replaced

FETCHING = 2**61  # where the locks of keys that are being fetched begin
LOCK = 0  # the budget's number in the folder's locks
DIGITS = 20  # of the count: written in one piece, so that a killed process leaves it whole


@dataclass
class BlobStats:
    """Counts of what this object did in this process. Bytes are those of pixels."""

    written: int = 0
    bytes_written: int = 0
    known: int = 0  # puts of what was there already
    read: int = 0
    bytes_read: int = 0
    fetched: int = 0  # reads that `source` answered
    unwritten: int = 0  # of these, handed out without being kept, for want of room


class BlobFolder(Mapping[str, Any]):
    """cache key -> pixels [patches, patch_dim], as files of `folder`; what `mp.pack(samples, media=…)` reads.

    Reading copies nothing: an array (of bfloat16 a tensor) lies over the file's pages, which all processes of a node
    share, and stays whole when the file goes. Who writes into it gets pages of its own.

    Args:
        folder: a path that all readers see: of this node, or of a disk that nodes share. Made if it is missing.
        max_bytes: of all files. Where a put does not fit, media that no process holds go, the least recently used
            first. None: as much as the disk takes.
        source: cache key -> pixels, for keys that are not here: such as a folder of another node's. What it gives is
            kept here, so that it is asked once a node.

    Objects can be sent to other processes. `put` holds what it keeps for this process, until `release` or its end,
    whatever ends it. Raises: ArgumentError; BackendError where there are no such locks (not Linux).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        source: Mapping[str, Any] | None = None,
    ):
        if not isinstance(folder, str | os.PathLike):
            raise ArgumentError(f"{self._name}: folder is {folder!r:.60}. Fix: pass a path")
        if max_bytes is not None:
            check_whole(self._name, "max_bytes", max_bytes)
        if not (source is None or hasattr(source, "get")):
            raise ArgumentError(
                f"{self._name}: source is {type(source).__name__}, expected pixels by cache key. "
                "Fix: pass a mapping of cache keys to pixels"
            )
        self.folder, self.max_bytes, self.source = Path(folder).absolute(), max_bytes, source
        self.stats = BlobStats()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._locks = Locks(self.folder / "locks")
        except OSError as error:
            raise ArgumentError(
                f"{self._name}: can't write to {str(self.folder)[-80:]!a} ({error.strerror}). "
                "Fix: pass a folder that is writable and has room"
            ) from None
        self._budget = None if max_bytes is None else Budget(self.folder, max_bytes, self._locks)
        self._held: Counter[str] = Counter()  # what `release()` gives back

    @property
    def _name(self) -> str:
        return type(self).__name__

    # writing

    def put(self, key: str, pixels: Any) -> bool:
        """Keep pixels [patches, patch_dim] (array or tensor) under a cache key, and hold it. False: it was there.

        Raises: BlobError (MM503) where they don't fit into the budget with what is held, or on the disk;
        ArgumentError for no cache key, and for pixels of another type or shape than those under the key.
        """
        number = _number(key, self._name)
        self._locks.share(number)  # first: from here on nobody removes it
        try:
            wrote = self._kept(key, pixels)
        except BaseException:
            self._locks.release(number)
            raise
        self._held[key] += 1
        return wrote

    def _kept(self, key: str, pixels: Any) -> bool:
        name, shape, body = parts_of(key, pixels)
        path = self._path(key)
        known = _head(path)
        if known is not None:
            if known != (name, tuple(shape)):
                raise ArgumentError(
                    f"{self._name}: {key:.16}… is {known[0]} {list(known[1])} in the store, but {name} "
                    f"{list(shape)} now. "
                    "Fix: make all samples by one wrap_processor(…, pixels=…)"
                )
            self.stats.known += 1
            return False
        try:
            self._write(path, head_of(key, name, shape, body), body)
        except OSError as error:
            if self._budget is not None:
                self._budget.recount()
            raise BlobError(
                f"{self._name}: {body.nbytes} bytes can't be written to {str(self.folder)[-80:]!a} "
                f"({error.strerror}) (MM503). Fix: make room, or set a smaller max_bytes",
                "MM503",
            ) from None
        self.stats.written += 1
        self.stats.bytes_written += body.nbytes
        return True

    def _write(self, path: Path, head: bytes, body: np.ndarray) -> None:
        """Write a file whole, or not at all. Raises: OSError; BlobError where the budget has no room."""
        path.parent.mkdir(exist_ok=True)
        with ExitStack() as until_named, replaced(path, self._name, None, durable=False) as file:
            if self._budget is not None:
                self._budget.make_room(file.fileno(), len(head) + body.nbytes)
            file.write(head)
            file.write(body.data)
            if self._budget is not None:
                until_named.enter_context(self._budget.alone())

    # holding

    @contextmanager
    def hold(self, keys: Iterable[str]) -> Iterator[None]:
        """Keep every process from evicting these media within the block. Raises: BlobError (MM404): one is gone."""
        keys = list(keys)
        numbers = [_number(key, self._name) for key in keys]
        for number in numbers:
            self._locks.share(number)
        try:
            gone = [key for key in keys if key not in self]
            if gone:
                raise BlobError(
                    f"{self._name}: {gone[0]:.16}… is not in {str(self.folder)[-80:]!a} (MM404). "
                    "Fix: keep hold of it where it is made until it is held here, or raise max_bytes",
                    "MM404",
                )
            yield
        finally:
            for number in numbers:
                self._locks.release(number)

    def keep(self, keys: Iterable[str]) -> None:
        """Hold media for this process, as `put` does. Raises: BlobError (MM404): one is gone."""
        keys = list(keys)
        with self.hold(keys):
            for key in keys:
                self._locks.share(_number(key, self._name))
        self._held.update(keys)

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Let go of what `put` and `keep` hold for this process, once for each time that a key is named; None: of all
        of it. Media stay until room is needed."""
        for key in list(self._held.elements()) if keys is None else keys:
            if self._held[key]:
                self._locks.release(_number(key, self._name))
            self._held[key] -= 1
        self._held = +self._held

    # reading

    def __getitem__(self, key: str) -> Any:
        """The pixels of a key. Raises: KeyError; BlobError for a damaged file (MM502) or one that can't be read
        (MM501)."""
        path = self._path(key)
        try:
            pixels = read_blob(path, key)
        except FileNotFoundError:
            return self._fetched(key)
        except BlobError:
            with suppress(OSError):
                path.unlink()  # so that it can be put again
            if self.source is None:
                raise
            return self._fetched(key)
        except OSError as error:
            raise BlobError(
                f"{self._name}: {str(path)[-80:]!a} can't be read ({error.strerror}) (MM501). "
                "Fix: give this user the right to read it",
                "MM501",
            ) from None
        with suppress(OSError):  # of another user's; then others seem less used
            os.utime(path)
        self.stats.read += 1
        self.stats.bytes_read += pixels.nbytes
        return pixels

    def _fetched(self, key: str) -> Any:
        """Return pixels of `source`, and keep them for the node's other processes."""
        if self.source is None:
            raise KeyError(key)
        number = _number(key, self._name)
        # of the processes that miss it, one fetches
        with self._locks.alone(FETCHING + number, wait=True):
            if _head(self._path(key)) is None:
                pixels = self.source.get(key)
                if pixels is None:
                    raise KeyError(key)
                self.stats.fetched += 1
                self._locks.share(number)
                try:
                    self._kept(key, pixels)
                except BlobError as error:
                    self._warn(error)
                    return pixels
                finally:
                    self._locks.release(number)
        return self[key]

    def _warn(self, error: BlobError) -> None:
        self.stats.unwritten += 1
        if self.stats.unwritten == 1:
            warnings.warn(
                f"{error}; until then each process fetches media for itself",
                UnwrittenWarning,
                stacklevel=2,
            )

    def __contains__(self, key: object) -> bool:
        """Return whether a whole file is here, or `source` has the key. Reads only its head."""
        if not isinstance(key, str) or not KEY.fullmatch(key):
            return False
        return _head(self._path(key)) is not None or (
            self.source is not None and key in self.source
        )

    def __iter__(self) -> Iterator[str]:
        """The keys that are here."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            with suppress(FileNotFoundError):
                yield from (e.name for e in os.scandir(folder) if KEY.fullmatch(e.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def remove(self, keys: Iterable[str]) -> int:
        """Remove those that no process holds; how many. Arrays over them stay whole."""
        count = sum(self._removed(key) for key in keys)
        if self._budget is not None:
            self._budget.recount()
        return count

    def _removed(self, key: str) -> bool:
        path = self._path(key)
        with self._locks.alone(_number(key, self._name), wait=False) as unheld:
            if not unheld:
                return False
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def close(self) -> None:
        """Let go of everything; the files stay, and arrays over them too."""
        self._held.clear()
        self._locks.close()

    def __enter__(self) -> BlobFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the same folder; what this process holds stays its own."""
        return type(self), (self.folder, self.max_bytes, self.source)

    def __repr__(self) -> str:
        return f"{self._name}({str(self.folder)!r}, max_bytes={self.max_bytes})"

    def _path(self, key: str) -> Path:
        _number(key, self._name)
        return self.folder / key[:2] / key


def _number(key: str, name: str) -> int:
    """A key's lock. Keys of one number (of 2^60) are held together, which keeps one of them longer."""
    check_key(key, name)
    return int(key[:15], 16) + 1


def _head(path: Path) -> tuple[str, tuple[int, ...]] | None:
    try:
        return read_head(path)
    except OSError:
        return None


# ---- the budget -----------------------------------------------------------------------------------
# The file `used` counts bytes. It may be too high (of a process that was killed meanwhile), never too low: files have
# their whole size before they are counted, and take their names while nobody looks. Who needs more than there is left
# looks at all files, and so puts the count right.


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
