"""Rows of a tower's tensors: which media one call encodes, and the places that its rows go to.

Qwen2.5-VL's blocks and merger compute a medium window by window; their rows go to the places of their pixels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from mmpack.probe.places import Places
from mmpack.probe.record import Rows


@dataclass
class TowerCall:
    """One call of the tower: the media that it encodes, in order."""

    occurrences: list[list[int]]  # of each medium: where it stands in `Places.media`, once or more
    patches: list[int]  # of each medium
    # of each medium: its merged rows in the order of windows, int64; None: in the order of its pixels
    orders: list[np.ndarray | None] = field(default_factory=list)
    rows: dict[tuple[Fraction, bool], Rows] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.patches)


WINDOWED = re.compile(r"visual\.(blocks|merger)(\.|$)")  # modules between the two permutations
# may look up a table for positions or corners, in another order than the patches'
TABLE = re.compile(r"(rotary\w*|pos_embed)$")


def rows_of_tower(call: TowerCall, places: Places, count: int, module: str) -> Rows | None:
    """Rows of a module's tensor of `count` rows; None if that is no whole number of rows for each medium."""
    share = Fraction(count, call.total)
    key = share, WINDOWED.search(module) is not None
    if key in call.rows:
        return call.rows[key]
    sizes = [share * p for p in call.patches]
    every = [share * int(p) for p in places.media[:, 2]]
    if any(size.denominator != 1 for size in (*sizes, *every)):
        return None
    begin = np.concatenate([[0], np.cumsum([int(e) for e in every])]).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum([int(s) for s in sizes])]).astype(np.int64)
    take, into = [], []
    for j, occurrences in enumerate(call.occurrences):
        for o in occurrences:
            take.append(np.arange(ends[j], ends[j + 1]))
            order = call.orders[j] if key[1] and call.orders else None
            into.append(begin[o] + _natural(int(sizes[j]), order))
    made = Rows(str(share), torch.from_numpy(np.concatenate(take)), np.concatenate(into))
    call.rows[key] = made
    return made


def _natural(size: int, order: np.ndarray | None) -> np.ndarray:
    """int64 [size]: where each row of a medium lies in the order of its pixels."""
    if order is None or size % len(order):
        return np.arange(size)
    each = size // len(order)
    return (order[:, None] * each + np.arange(each)).reshape(-1)


def window_order(grid: tuple[int, int, int], vision_config: Any) -> np.ndarray | None:
    """int64 [merged rows]: a medium's merged rows as a tower with windows computes them; None of other towers."""
    if getattr(vision_config, "fullatt_block_indexes", None) is None:
        return None
    merge = vision_config.spatial_merge_size
    window = vision_config.window_size // merge // vision_config.patch_size
    t, h, w = grid
    frame, row, column = np.indices((t, h // merge, w // merge)).reshape(3, -1)
    return np.lexsort((column, row, column // window, row // window, frame))
