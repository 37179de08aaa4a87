"""Samples that a run could not use, and why: a file of JSON Lines that grows while the run goes on.

A letter with its sample is the sample's record of a trace, with the key `dead_letter`, which readers take for metadata;
any trace command reads it. A letter without one (a record that is none, an item that could not be made) holds what
there is of it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mmpack.errors import ArgumentError, SchemaError, UnwrittenWarning, one_line
from mmpack.schema.jsonl import dump_json
from mmpack.schema.rules.problems import structured
from mmpack.schema.sample import Sample

KEPT = 2000  # characters of a record that is no sample, and of a reason
BEGIN = b'{"dead_letter":'  # of each line, so that one that a killed writer left is known
LONGEST = 2**28  # bytes of a line; a longer one is no letter
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class DeadLetter:
    """One thing that could not be used. `code`: a rule (MMxxx); `place`: its origin, such as `t.jsonl: record 7`."""

    code: str
    reason: str
    place: str
    sample: Sample | None = None
    record: str | None = None  # the beginning of what is no sample

    @property
    def name(self) -> str:
        """Name by which letters are told apart: the sample's id, else its place."""
        return self.place if self.sample is None else self.sample.sample_id

    def line(self) -> str:
        """One line of JSON, without its end."""
        about = {"code": self.code, "reason": self.reason, "place": self.place}
        record, sample = self.record, self.sample
        if sample is not None:
            sample, faults = structured(sample)
            if not faults:
                return dump_json({"dead_letter": about, **sample.to_dict(numpy=True)})
            record = repr(self.sample)
        return dump_json({"dead_letter": {**about, "name": self.name}, "record": record})

    @classmethod
    def of_line(cls, line: str) -> DeadLetter:
        """Read what `line` wrote; the note leaves the sample's metadata. Raises: TraceError, ValueError, KeyError."""
        record = json.loads(line)
        about = record.pop("dead_letter")
        sample = None if "name" in about else Sample.from_dict(record)
        return cls(about["code"], about["reason"], about["place"], sample, record.get("record"))


def letter_of(
    error: BaseException, place: str, sample: Sample | None = None, record: str | None = None
) -> DeadLetter:
    """Return the letter for an error. Code: the error's own, else MM501 or MM503 for a file, else MM505."""
    if isinstance(error, SchemaError) and error.problems:
        code: str | None = error.problems[0].code
    else:
        code = getattr(error, "code", None)
    if not isinstance(code, str):
        code = _of_system(error)
    reason = one_line(f"{type(error).__name__}: {error}")[:KEPT]
    return DeadLetter(code, reason, place, sample, record)


def _of_system(error: BaseException | None) -> str:
    """Return the code of the OSError behind an error; MM505 if there is none."""
    while error is not None:
        if isinstance(error, OSError):
            return "MM503" if error.errno in NO_ROOM else "MM501"
        error = error.__cause__ or error.__context__
    return "MM505"


class DeadLetters:
    """The letters of a run, and of the runs that it goes on from; in a file that processes may share.

    Args: `path`: of JSON Lines; made with the first letter. A file of anything else is refused and stays as it is.

    `len` and `counts` (code -> letters) are of this object's own letters. A letter is appended whole or not at all, and
    once: a sample that is there already, by whichever process, is not written again. The file may be rotated (moved
    away) or emptied while the run goes on. Where it can't be written, letters wait in memory, a warning says so once,
    and `add` and `flush` try again: a run does not end for want of its letters. Raises: ArgumentError.

    Example:
        >>> import tempfile, mmpack as mp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     letters = mp.schema.DeadLetters(f"{folder}/dead.jsonl")
        ...     letters.add(mp.schema.DeadLetter("MM504", "its worker ended with exit code -9", "samples[3]"))
        ...     print(len(letters), dict(letters.counts), [x.place for x in letters.read()])
        1 {'MM504': 1} ['samples[3]']
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(
                f"DeadLetters: path is {path!r:.60}. Fix: pass the name of a .jsonl file"
            )
        self.path = Path(path)
        self.counts: Counter[str] = Counter()
        self._waiting: list[DeadLetter] = []
        self._own: set[str] = set()
        self._warned = False
        self._begin_anew(None)
        try:
            with self._opened(os.O_RDONLY) as file:
                _check_first(file)
        except _NoLetters as error:
            raise ArgumentError(
                f"DeadLetters: {self.path} {error.strerror}. Fix: pass the name of a new file, or of one that "
                "DeadLetters wrote"
            ) from None
        except OSError:  # none yet, or one that `add` warns of
            pass

    def add(self, letters: DeadLetter | Iterable[DeadLetter]) -> None:
        """Write letters, each with a name of its own once."""
        for letter in [letters] if isinstance(letters, DeadLetter) else letters:
            if letter.name not in self._own:
                self._own.add(letter.name)
                self.counts[letter.code] += 1
                self._waiting.append(letter)
        self.flush()

    def flush(self) -> None:
        """Try again to write what waits in memory."""
        if not self._waiting:
            return
        try:
            self._append()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"DeadLetters: {self.path} can't be written ({error.strerror}); letters wait in memory. "
                    "Fix: make room, or give this user the right to write",
                    UnwrittenWarning,
                    stacklevel=3,
                )

    @property
    def unwritten(self) -> int:
        """Letters that wait in memory."""
        return len(self._waiting)

    def __len__(self) -> int:
        return self.counts.total()

    def read(self) -> Iterator[DeadLetter]:
        """All letters in the file, in order; lines that are cut or no letter are skipped."""
        if self.path.exists():
            with self._opened(os.O_RDONLY) as file:
                yield from (letter for _, letter in _letters(file) if letter is not None)

    def _opened(self, flags: int) -> IO[bytes]:
        """Raises: OSError, also for what is no regular file: a device or a pipe may have no end."""
        file = os.open(self.path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise _NoLetters("is no regular file")
        return os.fdopen(file, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)

    def _begin_anew(self, file: tuple[int, int] | None) -> None:
        """Note that nothing of `file` (device and inode) was read yet."""
        self._file = file
        self._names: set[str] = set()  # of the letters in the file, as far as it was read
        self._read, self._last = 0, b""  # so many bytes, and the last line of them

    def _append(self) -> None:
        """Under a lock that all writers take. Raises OSError, with the file as it was."""
        with self._opened(os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = self._caught_up(file)
            new = {x.name: x for x in self._waiting if x.name not in self._names}
            lines = [(letter.line() + "\n").encode() for letter in new.values()]
            text = b"".join(lines)
            try:
                while text:
                    text = text[file.write(text) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
            self._names |= new.keys()
            self._read = file.seek(0, os.SEEK_END)
            self._last = lines[-1] if lines else self._last
            self._waiting.clear()

    def _caught_up(self, file: IO[bytes]) -> int:
        """Note what others wrote meanwhile, and cut off a line that a killed writer left; where the file ends then.

        A file that was rotated or emptied since is read from its beginning.
        """
        status = os.fstat(file.fileno())
        file.seek(max(self._read - len(self._last), 0))
        if self._file != (status.st_dev, status.st_ino) or file.read(len(self._last)) != self._last:
            self._begin_anew((status.st_dev, status.st_ino))
            _check_first(file)
        file.seek(self._read)
        for line, letter in _letters(file):
            if not line.endswith(b"\n") and len(line) < LONGEST:
                _check_begin(line)
                file.truncate(self._read)
                break
            self._read, self._last = self._read + len(line), line
            if letter is not None:
                self._names.add(letter.name)
        return self._read


class _NoLetters(OSError):
    """The file is not one of letters; nothing may be written to it."""

    def __init__(self, why: str):
        super().__init__(errno.EINVAL, why)


def _letters(file: IO[bytes]) -> Iterator[tuple[bytes, DeadLetter | None]]:
    """Each line from here on, and its letter."""
    lines = io.BufferedReader(file)  # type: ignore[type-var]
    try:
        while line := lines.readline(LONGEST):
            yield line, _parsed(line)
    finally:
        lines.detach()


def _check_first(file: IO[bytes]) -> None:
    """Raises: _NoLetters, if the first line is neither a letter nor the beginning of one."""
    file.seek(0)
    line = next((line for line, _ in _letters(file)), b"")
    if line.endswith(b"\n") and _parsed(line) is None:
        raise _NoLetters("holds lines that are no letters")
    _check_begin(line)


def _check_begin(line: bytes) -> None:
    """Raises: _NoLetters, if no killed writer can have left `line`."""
    if not line.startswith(BEGIN[: len(line)]):
        raise _NoLetters("ends in a line that is no letter")


def _parsed(line: bytes) -> DeadLetter | None:
    try:
        return DeadLetter.of_line(line.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
