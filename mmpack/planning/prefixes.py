"""The prefix forest of all samples of a plan, built once: that of some is made of the segments on their paths."""

from __future__ import annotations

import numpy as np

from mmpack.layout.forest import build_forest
from mmpack.planning.counts import (
    NO_WINDOWS,
    Counts,
    Spans,
    pairs_until,
    tree_counts,
    waves_of,
    window_pairs_until,
)
from mmpack.planning.layer_bytes import chunks_of
from mmpack.schema.sample import Sample


class SharedPrefixes:
    """`kept`: indices of the samples that the forest is of. `path`: the segments of each, the first one at the root."""

    def __init__(self, samples: list[Sample], kept: list[int], spans: Spans = NO_WINDOWS):
        forest = build_forest([samples[i] for i in kept])
        start = forest.segment_depth
        stop = start + np.diff(forest.segment_offsets)
        self.start: list[int] = start.tolist()  # depths, of each segment
        self.stop: list[int] = stop.tolist()
        self.parent: list[int] = forest.segment_parent.tolist()
        self.wave = waves_of(self.parent)
        self.path = {i: forest.path(k) for k, i in enumerate(kept)}
        self.spans = spans

    def rows(self, segment: int) -> int:
        return self.stop[segment] - self.start[segment]

    def segment(self, g: int) -> Counts:
        """Counts of one segment, given the segments above it."""
        a, b, window = self.start[g], self.stop[g], self.spans.window
        near = window_pairs_until(b, window) - window_pairs_until(a, window)
        return Counts(b - a, pairs_until(b) - pairs_until(a), near)

    def linear(self, members: list[int]) -> tuple[int, int]:
        """What linear attention takes of these samples' forest: chunks of rows, and segments below another."""
        segments = {g for i in members for g in self.path[i]}
        chunks = sum(chunks_of(self.rows(g)) for g in segments)
        return chunks, sum(self.parent[g] >= 0 for g in segments)

    def counts(self, members: list[int]) -> Counts:
        """Counts of these samples' forest, without media and loss tokens."""
        segments = {g for i in members for g in self.path[i]}
        above = {self.parent[g] for g in segments}
        return tree_counts(
            [self.start[g] for g in segments],
            [self.stop[g] for g in segments],
            [g not in above for g in segments],
            max((self.wave[g] for g in segments), default=1),
            self.spans,
        )
