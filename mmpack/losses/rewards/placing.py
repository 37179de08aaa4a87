"""Scores to the tokens of the loss axis [N] that they go to, in numpy, without a loop over tokens.

The starts and stops of all scores cut the axis into pieces. On a piece every token has the same scores, and they add up
in the order in which they were given: a table [pieces + 1] of offsets into the scores of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpack.packing.places import WIDE, LossPlaces

SEQUENCE, TURN, REGION, SPAN = range(4)
LAST, ALL, MEAN = range(3)


@dataclass
class Flat:
    """K scores as columns: whose they are, their scope (kind and numbers), and where in it they go."""

    sample: np.ndarray  # [K] int64
    kind: np.ndarray  # [K] int64
    first: np.ndarray  # [K] int64: the turn, the region, or the span's start; -1 to 2^31 - 1
    second: np.ndarray  # [K] int64: the span's stop
    at: np.ndarray  # [K] int64: LAST, ALL, MEAN


@dataclass
class Table:
    """What to add up: on tokens edges[p] to edges[p + 1] the scores index[offsets[p] : offsets[p + 1]]."""

    edges: np.ndarray  # [P+1] int64, from 0 to N
    offsets: np.ndarray  # [P+1] int64
    index: np.ndarray  # [terms] int64 into the scores
    most: int  # scores of one piece


def scoped(places: LossPlaces, flat: Flat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of each score's scope: (score, start, stop) by score and place, none of them empty."""
    found = []
    for kind, ranges in (
        (SEQUENCE, _sequences),
        (TURN, _turns),
        (REGION, _regions),
        (SPAN, _spans),
    ):
        score = np.flatnonzero(flat.kind == kind)
        if len(score):
            owner, start, stop = ranges(places, flat, score)
            full = stop > start
            found.append((owner[full], start[full], stop[full]))
    if not found:
        return (np.zeros(0, dtype=np.int64),) * 3
    owner, start, stop = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(owner, kind="stable")
    return owner[order], start[order], stop[order]


def cut_to_last(
    owner: np.ndarray, start: np.ndarray, stop: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep only the last token of scores that go there; the others stay as they are."""
    final = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    last = at[owner] == LAST
    keep = final | ~last
    return owner[keep], np.where(last, stop - 1, start)[keep], stop[keep]


def table_of(owner: np.ndarray, start: np.ndarray, stop: np.ndarray, count: int) -> Table:
    """The table of `count` tokens, from ranges that are sorted by their score."""
    edges = np.unique(np.concatenate([start, stop, [0, count]]))
    first = np.searchsorted(edges, start)
    covered = np.searchsorted(edges, stop) - first
    begins = np.cumsum(covered) - covered
    piece = np.repeat(first - begins, covered) + np.arange(covered.sum())
    order = np.argsort(piece, kind="stable")  # a piece's scores stay in their order
    offsets = np.searchsorted(piece[order], np.arange(len(edges)))
    most = int(np.diff(offsets).max(initial=0))
    return Table(edges, offsets, np.repeat(owner, covered)[order], most)


def _sequences(places: LossPlaces, flat: Flat, score: np.ndarray) -> tuple[np.ndarray, ...]:
    sample = flat.sample[score]
    return score, places.offsets[sample], places.offsets[sample + 1]


def _regions(places: LossPlaces, flat: Flat, score: np.ndarray) -> tuple[np.ndarray, ...]:
    regions = places.regions[np.argsort(places.regions[:, 0], kind="stable")]
    sample, number = flat.sample[score], flat.first[score]
    row = np.searchsorted(regions[:, 0], sample) + number
    there = (number >= 0) & (row < np.searchsorted(regions[:, 0], sample, side="right"))
    return score[there], regions[row[there], 1], regions[row[there], 2]


def _spans(places: LossPlaces, flat: Flat, score: np.ndarray) -> tuple[np.ndarray, ...]:
    sample = flat.sample[score]
    bounds = (flat.first[score], flat.second[score])
    start, stop = (_place_of(places, sample, token) for token in bounds)
    return score, start, stop


def _place_of(places: LossPlaces, sample: np.ndarray, token: np.ndarray) -> np.ndarray:
    """The place on the loss axis of the first loss token of `sample` that is `token` or behind it."""
    if not len(places.runs):
        return places.offsets[sample]
    whose, _, first, start, stop = places.runs.T
    run = np.searchsorted(whose * WIDE + first, sample * WIDE + np.maximum(token, 0), side="right")
    run -= 1
    inside = (run >= 0) & (whose[run] == sample)
    place = np.minimum(start[run] + token - first[run], stop[run])
    return np.where(inside, place, places.offsets[sample])


def _turns(places: LossPlaces, flat: Flat, score: np.ndarray) -> tuple[np.ndarray, ...]:
    whose, turn, _, start, stop = np.concatenate([places.runs, places.more]).T
    key = whose * WIDE + turn + 1  # -1, in no turn, comes before all
    order = np.argsort(key, kind="stable")
    wanted = np.where(flat.first[score] >= 0, flat.sample[score] * WIDE + flat.first[score] + 1, -1)
    begin = np.searchsorted(key[order], wanted)
    length = np.searchsorted(key[order], wanted, side="right") - begin
    shift = np.cumsum(length) - length
    run = order[np.repeat(begin - shift, length) + np.arange(length.sum())]
    return np.repeat(score, length), start[run], stop[run]
