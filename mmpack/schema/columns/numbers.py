"""Columns of lists of numbers, as Arrow has them, in numpy without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.errors import require


@dataclass
class Numbers:
    """A column of lists, or of lists of lists: row i is `flat[bounds[i]:bounds[i + 1]]`.

    Its lists are `widths[outer[i]:outer[i + 1]]` long (one in each row, if lists hold numbers).
    """

    flat: np.ndarray
    bounds: np.ndarray  # [n + 1]
    outer: np.ndarray  # [n + 1]
    widths: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)

    def each(self, holds: Callable[[np.ndarray], Any]) -> np.ndarray:
        """bool [n]: whether `holds` is true of a row's values. It must hold for all if it holds for each."""
        if holds(self.flat):
            return np.ones(len(self.bounds) - 1, bool)
        return np.array(
            [bool(holds(self.flat[a:b])) for a, b in pairwise(self.bounds.tolist())], bool
        )

    def same(self, other: Numbers) -> np.ndarray:
        """bool [n]: equal values in equal shapes."""
        return same_slices(self.flat, self.bounds, other.flat, other.bounds) & same_slices(
            self.widths, self.outer, other.widths, other.outer
        )


def numbers(column: Any, depth: int) -> Numbers | None:
    """An Arrow column of lists (depth 1) or lists of lists (2); None if it is of another type or has a null within."""
    types = require("pyarrow", "parquet", "read_trace of a .parquet file").types
    levels = []
    for level in range(depth):
        if not (types.is_list(column.type) or types.is_large_list(column.type)):
            return None
        if level and column.null_count:
            return None
        bounds = column.offsets.to_numpy(zero_copy_only=True)
        start, stop = int(bounds[0]), int(bounds[-1])
        levels.append(bounds - start)
        column = column.values.slice(start, stop - start)
    kind = column.type
    if column.null_count or not (types.is_integer(kind) or types.is_floating(kind)):
        return None
    flat, widths = column.to_numpy(zero_copy_only=True), np.diff(levels[-1])
    if depth == 1:
        return Numbers(flat, levels[0], np.arange(len(widths) + 1), widths)
    return Numbers(flat, levels[1][levels[0]], levels[0], widths)


def same_slices(a: np.ndarray, at: np.ndarray, b: np.ndarray, bt: np.ndarray) -> np.ndarray:
    """bool [n]: whether `a[at[i]:at[i + 1]]` equals `b[bt[i]:bt[i + 1]]`."""
    if np.array_equal(at, bt) and np.array_equal(a, b):
        return np.ones(len(at) - 1, bool)
    both = zip(pairwise(at.tolist()), pairwise(bt.tolist()), strict=True)
    return np.array([np.array_equal(a[i:j], b[k:m]) for (i, j), (k, m) in both], bool)
