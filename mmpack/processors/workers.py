"""Samples made in worker processes: one that dies takes no sample with it but the one that killed it."""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
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
    the item that it was making is made again in a new one while the others rest, and given up only if it ends that one
    each time. Raises: ArgumentError; BackendError where no worker starts. Leaving the loop ends the workers.
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
                f"SampleWorkers: data is {type(data).__name__}, which lacks a length or items by index. "
                "Fix: pass a list, or a map-style data set"
            )
        check_whole("SampleWorkers", "workers", workers)
        check_whole("SampleWorkers", "tries", tries)
        ahead = 2 * workers if ahead is None else ahead
        check_whole("SampleWorkers", "ahead", ahead)
        if not (media is None or isinstance(media, BlobFolder)):
            raise ArgumentError(
                f"SampleWorkers: media is {type(media).__name__}. Fix: pass a store of mmpack.blobs, or leave it out"
            )
        self.data, self.workers, self.order = data, workers, order
        self.ahead, self.media, self.tries = ahead, media, tries
        self._own = threading.local()  # `process`: of a thread, which runs its items in turn
        self._processes: list[WorkerProcess] = []
        self._turns = _Turns()

    def __len__(self) -> int:
        return len(self.data if self.order is None else self.order)  # type: ignore[arg-type]

    @property
    def pids(self) -> list[int]:
        """The workers that run now."""
        return [process.pid for process in list(self._processes)]

    def __iter__(self) -> Iterator[Any]:
        order = enumerate(range(len(self.data)) if self.order is None else self.order)
        window: deque[tuple[int, int, Future[Any]]] = deque()  # place in the order, number, item
        threads = ThreadPoolExecutor(self.workers, "mmpack-samples")
        try:
            while True:
                while len(window) < self.ahead and (at := next(order, None)) is not None:
                    window.append((*at, threads.submit(self._make, *at)))
                if not window:
                    return
                place, number, made = window.popleft()
                yield self._given(place, number, made.result(), threads)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
            while self._processes:
                self._processes.pop().stop()
            self._own = threading.local()

    def _given(self, place: int, number: int, item: Any, threads: ThreadPoolExecutor) -> Any:
        """The item, its media held; or the letter in its place."""
        for _ in range(STARTS):
            sample = item[0] if isinstance(item, (tuple, list)) and item else item
            if self.media is None or not isinstance(sample, Sample):
                return item
            try:
                self.media.keep(sample.media_cache_keys)
                return item
            except BlobError as gone:  # its worker died, and others needed the room
                error = gone
            item = threads.submit(self._make_alone, place, number).result()
        return letter_of(error, f"samples[{number}]")

    def _make(self, place: int, number: int) -> Any:
        """The item or its letter, in a thread of its worker."""
        try:
            with self._turns.beside_others():
                return self._asked(place, number)
        except WorkerDied:
            return self._make_alone(place, number)

    def _make_alone(self, place: int, number: int) -> Any:
        with self._turns.alone():
            for _ in range(self.tries):
                try:
                    return self._asked(place, number)
                except WorkerDied:
                    pass
        why = f"its worker process ended {self.tries} times, with nothing else to do"
        return DeadLetter("MM504", why, f"samples[{number}]")

    def _asked(self, place: int, number: int) -> Any:
        """Ask this thread's process, which is begun if there is none. Raises: WorkerDied; BackendError."""
        process = getattr(self._own, "process", None) or self._begun()
        try:
            return process.make(place, number, self.ahead)
        except WorkerDied:
            self._own.process = None
            self._processes.remove(process)
            process.stop()
            raise
        except Exception as error:  # of the item, as its bytes were read
            return letter_of(error, f"samples[{number}]")

    def _begun(self) -> WorkerProcess:
        for _ in range(STARTS):
            try:
                process = WorkerProcess(self.data, self.media)
            except WorkerDied:
                continue
            self._own.process = process
            self._processes.append(process)
            return process
        raise BackendError(
            "SampleWorkers: worker processes end before their first task. "
            "Fix: see their error above; a script needs `if __name__ == '__main__':`, and its data "
            "must unpickle"
        )


class _Turns:
    """Many at a time, or one alone."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._running, self._waiting = 0, 0  # waiting: for the others to end

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._change:
                self._running -= 1
                self._change.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._change:
            self._waiting += 1
            self._change.wait_for(lambda: not self._running)
            self._running += 1
        try:
            yield
        finally:
            with self._change:
                self._running -= 1
                self._waiting -= 1
                self._change.notify_all()


STARTED = b"started"


class WorkerDied(Exception):
    """The process ended before it sent what was asked of it."""


class WorkerProcess:
    """A process with its own copy of `data`, in a fresh Python. Raises WorkerDied if it ends before it begins."""

    def __init__(self, data: Any, media: BlobFolder | None):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, data, media))
        try:
            self._process.start()
        except BrokenPipeError as error:  # it ended while `data` was written to it
            self._pipe.close()
            raise WorkerDied from error
        finally:
            theirs.close()
        # at exit multiprocessing waits for its processes: a closed pipe ends this one
        atexit.register(self._pipe.close)
        try:
            self._received()
        except WorkerDied:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid  # type: ignore[return-value]

    def make(self, place: int, number: int, ahead: int) -> Any:
        """The item, or its letter. Raises: WorkerDied; what its bytes raise when they are read."""
        try:
            self._pipe.send((place, number, ahead))
        except OSError as error:
            raise WorkerDied from error
        return pickle.loads(self._received())

    def stop(self) -> None:
        """End it after the item that it is making."""
        atexit.unregister(self._pipe.close)
        self._pipe.close()
        self._process.join()

    def _received(self) -> bytes:
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerDied from error


# in the worker

_left: deque[tuple[int, list[str]]] = (
    deque()
)  # place in the order, and the keys that are held for it


def _work(pipe: Connection, data: Any, media: BlobFolder | None) -> None:
    try:
        pipe.send_bytes(STARTED)
        while True:
            place, number, ahead = pipe.recv()
            pipe.send_bytes(_made(data, media, place, number, ahead))
    except (EOFError, OSError):
        return  # the reader left


def _made(data: Any, media: BlobFolder | None, place: int, number: int, ahead: int) -> Any:
    """An item, or its letter, as bytes. What was made `ahead` places before is the reader's by now."""
    while media is not None and _left and _left[0][0] <= place - ahead:
        media.release(_left.popleft()[1])
    try:
        item = data[number]
        return ForkingPickler.dumps(item if media is None else _without_pixels(item, place, media))
    except Exception as error:
        return ForkingPickler.dumps(letter_of(error, f"samples[{number}]"))


def _without_pixels(item: Any, place: int, media: BlobFolder) -> Any:
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    sample = item[0] if pair else item
    if not isinstance(sample, Sample):
        return item
    keys = [m.cache_key for m in sample.media if m.pixel_values is not None]
    [lean] = take([sample], media)
    _left.append((place, keys))
    return (lean, item[1]) if pair else lean
