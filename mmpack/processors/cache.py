"""A bounded cache of processed media, least recently used out first. What it holds has `pixel_values`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np


class Processed(NamedTuple):
    grid_thw: tuple[int, int, int]
    pixel_values: np.ndarray  # [t·h·w, patch_dim]


class MediaCache:
    """Holds at most `max_bytes` of pixels; `hits` and `misses` count look-ups."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.held_bytes = self.hits = self.misses = 0
        self._entries: OrderedDict[str, Any] = OrderedDict()

    def get(self, key: str) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: Any) -> None:
        if entry.pixel_values.nbytes > self.max_bytes or key in self._entries:
            return
        self._entries[key] = entry
        self.held_bytes += entry.pixel_values.nbytes
        while self.held_bytes > self.max_bytes:
            _, old = self._entries.popitem(last=False)
            self.held_bytes -= old.pixel_values.nbytes

    def __len__(self) -> int:
        return len(self._entries)
