"""Chunks of CHUNK rows for the rule in plain torch, in the order in which they run: wave, step, segment.

A segment's chunks start at its first row. Longer segments come first in a wave, so that the segments which a step
still has are the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mmpack.ops.moving import Moving

CHUNK = 64


@dataclass
class ChunkPlan(Moving):
    """N chunks; wave w has the segments of depth w."""

    rows: torch.Tensor  # [N·CHUNK] int64: the row at each place, T for none
    places: torch.Tensor  # [T] int64: the place of each row
    steps: list[list[int]]  # of each wave: how many segments have a first, second, … chunk
    parents: list[torch.Tensor | None]  # of each wave [S] int64: places in the wave before

    @property
    def device(self) -> torch.device:
        return self.rows.device


def plan_chunks(offsets: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> ChunkPlan:
    """Plan of segments that are not empty: [G+1], [G], [G]."""
    lengths, total = np.diff(offsets), int(offsets[-1])
    counts = -(-lengths // CHUNK)
    by_wave = np.lexsort((-counts, depths))
    first = np.searchsorted(depths[by_wave], np.arange(depths.max(initial=-1) + 2))
    place = np.empty_like(parents)  # of each segment in its wave
    place[by_wave] = np.arange(len(parents)) - first[depths[by_wave]]

    segment = np.repeat(np.arange(len(parents)), counts)
    step = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((place[segment], step, depths[segment]))
    segment, step = segment[order], step[order]
    rows = (offsets[segment] + CHUNK * step)[:, None] + np.arange(CHUNK)
    rows = np.where(rows < offsets[segment + 1][:, None], rows, total).ravel()
    places = np.empty(total + 1, dtype=np.int64)
    places[rows] = np.arange(len(rows))

    steps, above = [], list[torch.Tensor | None]()
    for wave in range(len(first) - 1):
        here = by_wave[first[wave] : first[wave + 1]]
        steps.append([int((counts[here] > s).sum()) for s in range(int(counts[here].max()))])
        above.append(torch.from_numpy(place[parents[here]]) if wave else None)
    return ChunkPlan(torch.from_numpy(rows), torch.from_numpy(places[:total]), steps, above)
