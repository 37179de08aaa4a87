"""An iterator that runs in a thread of its own, ahead of whoever reads it; batches cross to the device between them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Generator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from mmpack.errors import ArgumentError
from mmpack.packing.batch import PackedBatch

T = TypeVar("T")
_END = object()


class Ahead(Generic[T]):
    """Items of `make`, at most `count` of them made before they are asked for; 0: none, and there is no thread.

    What `make` raises is raised where the item is asked for, with its own traceback. `close` ends the thread, after the
    item that it is at.
    """

    def __init__(self, make: Generator[T, None, None], count: int, name: str):
        self._make, self._name, self._pid = make, name, os.getpid()
        self._made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._free = threading.Semaphore(count)  # items that may be made now
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = self._closed = False
        if count:
            arguments = (make, self._made, self._free, self._stop)
            self._thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
            self._thread.start()

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        if self._closed:
            raise ArgumentError(
                f"{self._name}: close(), or a loop that started later, ended this loop. Fix: start a new loop"
            )
        if os.getpid() != self._pid:
            raise ArgumentError(
                f"{self._name}: this process was forked from the one that iterates, and a fork has none of its "
                "threads. "
                "Fix: start the loop in the process that reads it"
            )
        if self._thread is None:
            return next(self._make)
        item, error = self._made.get()
        if error is not None or item is _END:
            self._ended = True
            self.close()
            raise error or StopIteration
        self._free.release()
        made: T = item
        return made

    def close(self) -> None:
        """Stop making items; those that were made and not read are dropped."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        if self._thread is None:
            self._make.close()
            return
        self._stop.set()
        self._free.release()
        self._thread.join()
        while not self._made.empty():
            self._made.get()


def _work(
    make: Generator[T, None, None],
    made: SimpleQueue[tuple[Any, BaseException | None]],
    free: threading.Semaphore,
    stop: threading.Event,
) -> None:
    # no reference to an item stays here while the next one is waited for
    try:
        while free.acquire() and not stop.is_set():
            item: Any = next(make, _END)
            ended = item is _END
            made.put((item, None))
            del item
            if ended:
                break
        make.close()
    except BaseException as error:
        made.put((None, error))


class Mover:
    """`send` in the thread that packs, then `receive` in the one that computes. Devices that are not CUDA's: `to`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pins = device.type == "cuda"  # ROCm's, too

    def send(self, batch: PackedBatch) -> tuple[PackedBatch, Any]:
        """The batch on the device, and the event of its last copy (None: it has arrived)."""
        if not self.pins:
            return batch.to(self.device), None
        stream = _copies(self.device)
        # memory of this stream's own: no copy lands where the reader still reads
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            moved = batch.to(self.device, non_blocking=True)
            return moved, stream.record_event()

    def receive(self, batch: PackedBatch, event: Any) -> PackedBatch:
        """The batch for the current stream, which waits for the copies; the host does not."""
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            batch.record_stream(stream)
        return batch


@functools.cache
def _copies(device: torch.device) -> Any:
    """The stream of all loaders' copies to a device: memory that one leaves is the next one's."""
    return torch.cuda.Stream(device)
