"""Counters by which the programs of one launch find out which of them finishes last.

Each is 0 between launches: the last program puts it back. Launches that run at the same time must not share one.
Those of a stream run one after the other and share the stream's. A launch that a CUDA graph captures keeps its own.
"""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

STREAMS = 4096
CAPTURED = 61440

_lock = threading.Lock()


class _Pool:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.counters = _make_counters(device)
        self.of_stream: dict[int, int] = {}
        self.captured = itertools.count(STREAMS)

    def place(self, stream: int, capturing: bool) -> int:
        """Past the end where none is left."""
        if capturing:
            return next(self.captured)
        found = self.of_stream.get(stream)
        if found is None:
            with _lock:
                found = self.of_stream.setdefault(stream, len(self.of_stream))
        return found if found < STREAMS else len(self.counters)


_pools: dict[torch.device, _Pool] = {}


def take(device: torch.device) -> tuple[Tensor, int]:
    """An int32 tensor and the place of a counter in it that no other launch in flight uses."""
    if device.type == "cuda":
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            with _lock:
                if device not in _pools:
                    _pools[device] = _Pool(device)
        # A pool made while the first call is captured would belong to that graph.
        if device in _pools:
            pool = _pools[device]
            place = pool.place(torch.cuda.current_stream(device).cuda_stream, capturing)
            if place < len(pool.counters):
                return pool.counters, place
    return torch.zeros(1, dtype=torch.int32, device=device), 0


def _make_counters(device: torch.device) -> Tensor:
    """The counters, made by another thread on another stream: memory of this thread may be that of a CUDA graph."""
    made: list[Tensor] = []

    def make() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
            made.append(torch.zeros(STREAMS + CAPTURED, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()  # once, and only this stream

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
