"""Progress of long work: one bar on a terminal's stderr, nothing elsewhere; MMPACK_PROGRESS=0 or 1 decides instead.

A bar shows after DELAY seconds, so short work stays quiet, and where rich is installed. With MMPACK_PROGRESS=1 it
shows at once; where stderr is no terminal, as lines. Of bars within bars only the outermost shows, and only that of the
main thread of the main process, on rank 0.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from mmpack.errors import ArgumentError

__all__ = ["on_terminal", "progress", "tracked"]

T = TypeVar("T")
VARIABLE = "MMPACK_PROGRESS"
DELAY = 1.0  # seconds before a bar shows; none with MMPACK_PROGRESS=1
PAUSE = 0.1  # seconds between two looks of a bar
LINE_PAUSE = 10.0  # seconds between two lines, where MMPACK_PROGRESS=1 and stderr is no terminal

_outermost = threading.Lock()


def tracked(items: Iterable[T], what: str) -> Iterable[T]:
    """`items`, counted while they are taken; `items` itself where nothing is shown.

    Args: `what`: a word for the work (`comparing`).
    Raises: ArgumentError for an MMPACK_PROGRESS other than 0 and 1.

    Example:
        >>> from mmpack.progress import tracked
        >>> list(tracked([1, 2], "counting"))
        [1, 2]
    """
    if _wanted() is False:
        return items
    return _counted(items, what, len(items) if isinstance(items, Sized) else None)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A function that is told how many items were done since its last call; shown as by `tracked`.

    Example:
        >>> from mmpack.progress import progress
        >>> with progress("comparing", total=3) as done:
        ...     done(3)
    """
    wanted = _wanted()
    if wanted is False or not _outermost.acquire(blocking=False):
        yield _silent
        return
    bar = _Bar(what, total, always=wanted is True)
    try:
        yield bar.advance
    finally:
        bar.close()
        _outermost.release()


def on_terminal() -> bool:
    """Whether stderr is a terminal and MMPACK_PROGRESS is not 0."""
    return _wanted() is not False and _is_terminal()


def _counted(items: Iterable[T], what: str, total: int | None) -> Iterator[T]:
    with progress(what, total) as done:
        for item in items:
            yield item
            done(1)


def _silent(count: int) -> None:
    pass


def _wanted() -> bool | None:
    """False: nothing is shown. True: MMPACK_PROGRESS asks for it. None: a terminal that may show it."""
    asked = os.environ.get(VARIABLE) or None
    if asked not in (None, "0", "1"):
        raise ArgumentError(
            f"{VARIABLE} is {asked!r:.40}. Fix: set it to 0 for no bars, 1 for bars"
        )
    main = (
        threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
        and os.environ.get("RANK", "0") == "0"
    )
    if asked == "0" or not main or sys.stderr is None:
        return False
    if asked == "1":
        return True
    return None if _draws() else False


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _draws() -> bool:
    return _is_terminal() and importlib.util.find_spec("rich") is not None


class _Bar:
    """On a terminal rich's bar, else lines."""

    def __init__(self, what: str, total: int | None, always: bool) -> None:
        self.what, self.total, self.done = what, total, 0
        self.start = time.monotonic()
        self.draws = _draws()
        self.due = self.start + (0.0 if always else DELAY)
        self.drawn: Any = None  # rich's Progress
        self.always = always
        if always:
            self._draw()

    def advance(self, count: int) -> None:
        self.done += count
        if time.monotonic() >= self.due:
            self._draw()

    def close(self) -> None:
        if self.drawn is not None:
            self.drawn.update(self.task, completed=self.done)
            self.drawn.stop()
        elif self.always:
            self._line()

    def _draw(self) -> None:
        self.due = time.monotonic() + (PAUSE if self.draws else LINE_PAUSE)
        if not self.draws:
            self._line()
            return
        if self.drawn is None:
            from rich import progress as bars
            from rich.console import Console

            self.drawn = bars.Progress(
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TimeRemainingColumn(),
                console=Console(stderr=True),
                redirect_stdout=False,  # results go there
                transient=True,
            )
            self.task = self.drawn.add_task(self.what, total=self.total)
            self.drawn.start()
        self.drawn.update(self.task, completed=self.done)

    def _line(self) -> None:
        of = "" if self.total is None else f" of {self.total:,}"
        seconds = time.monotonic() - self.start
        sys.stderr.write(f"mmpack: {self.what}: {self.done:,}{of}, {seconds:.0f} s\n")
        sys.stderr.flush()
