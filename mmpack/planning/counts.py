"""What a micro-batch holds, as its cost counts it; counts add up over micro-batches.

Rows are packed. A pair is a query and a key that it sees, a row and itself among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmpack.layout.forest import Forest


class Counts(NamedTuple):
    """`keys`: those that the sequences of a shared pack gather, 0 where none has rows above it. `waves`: depths of the
    forest after the first; linear attention runs one after the other. `patches`: before merging. `frame_pairs`: of
    patches of one frame; `tile_pairs`: of one window of the tower. `audio_frames`: of features. `batches`:
    micro-batches."""

    rows: int = 0
    pairs: int = 0
    window_pairs: int = 0
    keys: int = 0
    waves: int = 0
    loss_tokens: int = 0
    patches: int = 0
    frame_pairs: int = 0
    tile_pairs: int = 0
    audio_frames: int = 0
    batches: int = 1

    @property
    def squares(self) -> int:
        """The sum of L² over samples; for a tree of depths [a, b) the sum of b² - a²."""
        return 2 * self.pairs - self.rows


class Spans(NamedTuple):
    """How far a model's windows reach: tokens that a query sees in the decoder's windowed layers, itself among them,
    and patches on a side of the tower's windows; None: it has none."""

    window: int | None = None
    tile: int | None = None


NO_WINDOWS = Spans()


def summed(counts: Iterable[Counts]) -> Counts:
    """Counts of several micro-batches together."""
    return Counts(*map(sum, zip(*counts, strict=True))) if (counts := list(counts)) else NOTHING


NOTHING = Counts(batches=0)


def pairs_until(depth: int) -> int:
    """Pairs of a path's first rows."""
    return depth * (depth + 1) // 2


def window_pairs_until(depth: int, window: int | None) -> int:
    """And where each row sees the last `window` rows, itself among them."""
    if window is None:
        return 0
    near = min(depth, window)
    return pairs_until(near) + (depth - near) * window


def plain_counts(lengths: Collection[int], spans: Spans = NO_WINDOWS) -> Counts:
    """Samples one after the other, without media and loss tokens."""
    return Counts(
        sum(lengths),
        sum(map(pairs_until, lengths)),
        sum(window_pairs_until(n, spans.window) for n in lengths) if spans.window else 0,
    )


def tree_counts(
    starts: Sequence[int],
    stops: Sequence[int],
    leaves: Sequence[bool],
    waves: int,
    spans: Spans = NO_WINDOWS,
) -> Counts:
    """A forest of segments, each over depths [start, stop) of its paths; `leaves`: none lies below it.

    Kernels get a sequence for each leaf, whose keys are its path.
    """
    rows = sum(stops) - sum(starts)
    keys = sum(stop for stop, leaf in zip(stops, leaves, strict=True) if leaf)
    pairs = sum(map(pairs_until, stops)) - sum(map(pairs_until, starts))
    near = 0
    if spans.window:
        near = sum(window_pairs_until(b, spans.window) for b in stops)
        near -= sum(window_pairs_until(a, spans.window) for a in starts)
    return Counts(rows, pairs, near, keys if keys > rows else 0, max(waves - 1, 0))


def counts_of_forest(forest: Forest, spans: Spans = NO_WINDOWS) -> Counts:
    """Counts of a forest, shared or plain, without media and loss tokens."""
    return _of_segments(
        forest.segment_depth, np.diff(forest.segment_offsets), forest.segment_parent, spans
    )


def counts_of_batch(batch: Any, spans: Spans = NO_WINDOWS) -> Counts:
    """Counts of a PackedBatch, padding left out."""
    offsets, parents = (np.asarray(x.cpu()) for x in (batch.segment_offsets, batch.segment_parent))
    lengths = np.diff(offsets)
    depths = np.zeros(len(lengths), dtype=np.int64)
    for g, parent in enumerate(parents.tolist()):
        if parent >= 0:
            depths[g] = depths[parent] + lengths[parent]
    found = _of_segments(depths, lengths, parents, spans)
    media = ((m.modality, m.grid_thw) for m in batch.media)
    return with_media(found, media, spans)._replace(loss_tokens=int(batch.cu_loss[-1]))


def _of_segments(
    starts: np.ndarray, lengths: np.ndarray, parents: np.ndarray, spans: Spans
) -> Counts:
    leaves = np.ones(len(starts), dtype=bool)
    leaves[parents[parents >= 0]] = False
    waves = max(waves_of(parents.tolist()), default=1)
    stops = starts + lengths
    return tree_counts(starts.tolist(), stops.tolist(), leaves.tolist(), waves, spans)


def waves_of(parents: Sequence[int]) -> list[int]:
    """Wave of each segment, from 1: one more than its parent's."""
    waves: list[int] = []
    for parent in parents:
        waves.append(1 if parent < 0 else waves[parent] + 1)
    return waves


def with_media(
    counts: Counts, media: Iterable[tuple[str, tuple[int, int, int]]], spans: Spans = NO_WINDOWS
) -> Counts:
    """And media: modality and grid of each distinct one."""
    patches = frames = tiles = heard = 0
    for modality, grid in media:
        if modality == "audio":
            heard += grid[0]
            continue
        t, h, w = grid
        patches += t * h * w
        frames += t * (h * w) ** 2
        if spans.tile:
            tiles += t * _squares(h, spans.tile) * _squares(w, spans.tile)
    return counts._replace(
        patches=patches, frame_pairs=frames, tile_pairs=tiles, audio_frames=heard
    )


def _squares(length: int, side: int) -> int:
    """The sum of squares of what is left when a length is cut into pieces of `side`."""
    whole, rest = divmod(length, side)
    return whole * side * side + rest * rest
