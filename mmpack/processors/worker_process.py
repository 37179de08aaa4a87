"""One worker process and its pipe; and what runs in it.

Only the worker holds the far end of its pipe: when it dies, the pipe ends, also in the middle of an item. The pool of
concurrent.futures has one pipe for all workers, and waits for ever for the rest of such an item.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mmpack.blobs.folder import BlobFolder
from mmpack.blobs.take import take
from mmpack.schema.dead_letters import letter_of
from mmpack.schema.sample import Sample

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
