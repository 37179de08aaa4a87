"""Rows of a tower's tensors: which media one call encodes, and the places that its rows go to."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

from mmpack.probe.places import Places
from mmpack.probe.record import Rows


@dataclass
class TowerCall:
    """One call of the tower: the media that it encodes, in order."""

    occurrences: list[list[int]]  # of each medium: where it stands in `Places.media`, once or more
    patches: list[int]  # of each medium
    rows: dict[Fraction, Rows] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.patches)


def rows_of_tower(call: TowerCall, places: Places, count: int) -> Rows | None:
    """Rows of a tower's tensor of `count` rows; None if that is no whole number of rows for each medium."""
    share = Fraction(count, call.total)
    if share in call.rows:
        return call.rows[share]
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
            into.append(np.arange(begin[o], begin[o + 1]))
    made = Rows(str(share), torch.from_numpy(np.concatenate(take)), np.concatenate(into))
    call.rows[share] = made
    return made
