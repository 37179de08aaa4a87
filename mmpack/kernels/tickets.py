"""Counters by which the blocks of one launch find out which of them finishes last.

Each is 0 between launches: the last block puts it back. Launches that run at the same time must not share one, so
eager calls go round a ring, and a call that is captured into a CUDA graph keeps its counter for good.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

RING = 4096
KEPT = 61440  # for calls that are captured

_pools: dict[torch.device, tuple[Tensor, itertools.count[int], itertools.count[int]]] = {}


def take(device: torch.device) -> tuple[Tensor, int]:
    """An int32 tensor and the place of a counter in it that no other launch in flight uses."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device not in _pools:
        if capturing:  # a pool made now would belong to the graph
            return torch.zeros(1, dtype=torch.int32, device=device), 0
        pool = torch.zeros(RING + KEPT, dtype=torch.int32, device=device)
        _pools[device] = pool, itertools.count(), itertools.count(RING)
    pool, eager, captured = _pools[device]
    if not capturing:
        return pool, next(eager) % RING
    place = next(captured)
    if place < len(pool):
        return pool, place
    return torch.zeros(1, dtype=torch.int32, device=device), 0
