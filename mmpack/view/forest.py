"""The forest of shared prefixes: segments by rows from left to right, and by depth from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from mmpack.view.parts import MOST, WIDE, Box, Drawing, Shape, Stroke

TALLEST = 420.0  # of all levels together
HIGH, LINE, GAP = 18.0, 4.0, 5.0  # of a level: the rows, the line of the loss below, room


def forest_drawing(
    offsets: Sequence[int],
    parents: Sequence[int],
    ends: Mapping[int, Sequence[str]],
    kind: np.ndarray,
    loss: np.ndarray,
    styles: Sequence[str],
) -> tuple[Drawing, int]:
    """The drawing, and how many of the segments are not in it.

    Args: `offsets` [G+1] rows and `parents` [G], -1 for a root, of the segments; a parent comes before its children.
        `ends`: of a segment the samples that end in it. `kind` int8 [T] into `styles`, `loss` bool [T]: of rows.
    """
    level: list[int] = []
    for parent in parents:
        level.append(0 if parent < 0 else level[parent] + 1)
    deepest = max(level, default=0) + 1
    size = min(1.0, TALLEST / (deepest * (HIGH + LINE + GAP)))
    step, scale = size * (HIGH + LINE + GAP), WIDE / max(offsets[-1], 1)
    shapes: list[Shape] = []
    drawn = 0
    for g, depth in enumerate(level):
        if len(shapes) > MOST:
            break
        start, stop, y = offsets[g], offsets[g + 1], depth * step
        parent = parents[g]
        if parent >= 0:  # from the end of what it goes on from
            turn, x = y - size * GAP / 2, start * scale + 0.5
            shapes.append(Stroke(offsets[parent + 1] * scale, turn, x, turn))
            shapes.append(Stroke(x, turn, x, y))
        for a, b in pieces(kind[start:stop], loss[start:stop]):
            x, width = (start + a) * scale, max((b - a) * scale - (b == stop - start), 0.6)
            shapes.append(Box(x, y, width, size * HIGH, styles[kind[start + a]]))
            if loss[start + a]:
                shapes.append(Box(x, y + size * (HIGH + 1), width, size * (LINE - 1), "mm-read"))
        names = ends.get(g, ())
        whose = f", ends {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else ""
        about = f"segment {g}: rows {start} to {stop}{whose}"
        whole = max((stop - start) * scale, 0.6)
        shapes.append(Box(start * scale, y, whole, size * (HIGH + LINE), "mm-hit", about))
        drawn += 1
    samples = sum(map(len, ends.values()))
    label = (
        f"{len(parents)} segments of {samples} samples, {deepest} deep, over {offsets[-1]:,} rows"
    )
    return Drawing(shapes, deepest * step, label), len(parents) - drawn


def pieces(*columns: np.ndarray, start: int = 0) -> Iterator[tuple[int, int]]:
    """[a, b) where all columns [L] are constant, from `start` on."""
    length = len(columns[0])
    changes = np.zeros(length, bool)
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    inner = np.flatnonzero(changes[start + 1 :]) + start + 1
    yield from pairwise([start, *inner.tolist(), length] if start < length else [])
