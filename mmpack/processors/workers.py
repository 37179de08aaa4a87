"""Samples made in worker processes: one that dies takes no sample with it but the one that killed it."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from mmpack.blobs.folder import BlobFolder
from mmpack.blobs.take import take
from mmpack.errors import ArgumentError, BackendError, BlobError, check_whole
from mmpack.schema.dead_letters import DeadLetter, letter_of
from mmpack.schema.sample import Sample

STARTS = 3  # of workers, before they are given up


class SampleWorkers:
    """Iterate over it for the items of `data`, in order, each made once in one of the worker processes.

    Args:
        data: a map-style data set (`len`, items by number) that can be pickled; its items are Samples, or pairs
            (Sample, columns) as in `collate`.
        workers: processes; each gets a copy of `data`, in a fresh Python.
        order: numbers of items; None: all.
        ahead: items that are made or being made before they are asked for; None: two per worker.
        media: a store that the workers leave pixels in. This process holds the media of the items that it was given,
            until `media.release(keys)`.
        tries: how often an item may end its worker, running alone, before it is given up.

    In place of an item that can't be made there is a `DeadLetter`, which `PackLoader(dead_letters=…)` takes: with the
    error's code, or MM504 where its worker died. When a worker dies, by a signal, for want of memory or in a library,
    the items that were under way are made again, one at a time, and only one that ends its worker each time is given
    up. Raises: ArgumentError; BackendError where no worker starts. Leaving the loop ends the workers.
    """

    def __init__(
        self,
        data: Any,
        *,
        workers: int = 2,
        order: Iterable[int] | None = None,
        ahead: int | None = None,
        media: BlobFolder | None = None,
        tries: int = 2,
    ):
        if not hasattr(data, "__getitem__") or (order is None and not hasattr(data, "__len__")):
            raise ArgumentError(
                f"SampleWorkers: data is {type(data).__name__}, which has no length or no items by number. "
                "Fix: a list, or a map-style data set"
            )
        check_whole("SampleWorkers", "workers", workers)
        check_whole("SampleWorkers", "tries", tries)
        ahead = 2 * workers if ahead is None else ahead
        check_whole("SampleWorkers", "ahead", ahead)
        if not (media is None or isinstance(media, BlobFolder)):
            raise ArgumentError(
                f"SampleWorkers: media is {type(media).__name__}. Fix: a store of mmpack.blobs, or leave it out"
            )
        self.data, self.workers, self.order = data, workers, order
        self.ahead, self.media, self.tries = ahead, media, tries
        self._pool: ProcessPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.data if self.order is None else self.order)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        order = enumerate(range(len(self.data)) if self.order is None else self.order)
        window: deque[tuple[int, int, Future[Any]]] = deque()  # place in the order, number, item
        self._start(self.workers)
        try:
            while True:
                while len(window) < self.ahead and (at := next(order, None)) is not None:
                    window.append((*at, self._submit(*at)))
                if not window:
                    return
                try:
                    window[0][2].result()
                except BrokenProcessPool:
                    self._one_by_one(window)
                except Exception:
                    pass  # of this item alone: it could not be sent
                place, number, item = window.popleft()
                yield self._given(place, number, item)
        finally:
            self._stop()

    def _given(self, place: int, number: int, made: Future[Any]) -> Any:
        """The item, its media held; or the letter in its place."""
        for _ in range(STARTS):
            error: BaseException | None = made.exception()
            if error is not None:
                return letter_of(error, f"samples[{number}]")
            item = made.result()
            sample = item[0] if isinstance(item, (tuple, list)) and item else item
            if self.media is None or not isinstance(sample, Sample):
                return item
            try:
                self.media.keep(sample.media_cache_keys)
                return item
            except BlobError as gone:  # its worker died, and others needed the room
                error = gone
            window = deque([(place, number, self._submit(place, number))])
            self._one_by_one(window)
            made = window[0][2]
        assert error is not None
        return letter_of(error, f"samples[{number}]")

    def _one_by_one(self, window: deque[tuple[int, int, Future[Any]]]) -> None:
        """Make the items of a broken pool that are not made yet, each alone; then begin a new pool."""
        self._start(1)
        for k, (place, number, made) in enumerate(window):
            if made.done() and not isinstance(made.exception(), BrokenProcessPool):
                continue
            for _ in range(self.tries):
                made = self._submit(place, number)
                if not isinstance(made.exception(), BrokenProcessPool):
                    break
                self._start(1)
            else:
                made = Future()
                why = f"its worker process ended {self.tries} times, with nothing else to do"
                made.set_result(DeadLetter("MM504", why, f"samples[{number}]"))
            window[k] = (place, number, made)
        self._start(self.workers)

    def _submit(self, place: int, number: int) -> Future[Any]:
        try:
            return self._running().submit(_make, place, number, self.ahead)
        except BrokenProcessPool as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def _running(self) -> ProcessPoolExecutor:
        assert self._pool is not None
        return self._pool

    def _start(self, workers: int) -> None:
        """New workers in place of the old. Raises: BackendError where none begins."""
        for _ in range(STARTS):
            self._stop()
            self._pool = ProcessPoolExecutor(
                workers, multiprocessing.get_context("spawn"), _begin, (self.data, self.media)
            )
            try:
                self._pool.submit(_begun).result()
                return
            except BrokenProcessPool:
                pass
        raise BackendError(
            "SampleWorkers: worker processes end before they begin. "
            "Fix: see their error above; a script needs `if __name__ == '__main__':`, and data that can be unpickled"
        )

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


# in a worker

_data: Any = None
_media: BlobFolder | None = None
_left: deque[tuple[int, list[str]]] = (
    deque()
)  # place in the order, and the keys that are held for it


def _begin(data: Any, media: BlobFolder | None) -> None:
    global _data, _media
    _data, _media = data, media


def _begun() -> None:
    """Whether a worker runs."""


def _make(place: int, number: int, ahead: int) -> Any:
    """An item, or its letter. What was made `ahead` places before is the reader's by now."""
    while _media is not None and _left and _left[0][0] <= place - ahead:
        _media.release(_left.popleft()[1])
    try:
        item = _data[number]
        return item if _media is None else _without_pixels(item, place, _media)
    except Exception as error:
        return letter_of(error, f"samples[{number}]")


def _without_pixels(item: Any, place: int, media: BlobFolder) -> Any:
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    sample = item[0] if pair else item
    if not isinstance(sample, Sample):
        return item
    keys = [m.cache_key for m in sample.media if m.pixel_values is not None]
    [lean] = take([sample], media)
    _left.append((place, keys))
    return (lean, item[1]) if pair else lean
