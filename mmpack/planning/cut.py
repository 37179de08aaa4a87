"""A group that no bin takes whole, in pieces: which samples stay together, so that the least is computed twice.

A part is what several of n items hold and a bin takes once: a segment of their prefix tree, a medium; or what is an
item's own. A piece pays for every part that one of its items holds, so a part in two pieces is paid twice: the pieces
of least price cut the tree where the least is repeated. Items are whole samples: no cut lies inside a medium or an
action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EXACT = 8  # items, of which every partition is weighed
JOINED = 256  # items, of which every pair is
_SMALL = 1e-12  # of a price: less is rounding

Pieces = list[list[int]]


@dataclass(frozen=True)
class Parts:
    """`has`: bool [n, P], which item holds which part. `taken`: int [P, D], what a part takes of each budget. `limits`:
    int [D]. `price`: float [P]."""

    has: np.ndarray
    taken: np.ndarray
    limits: np.ndarray
    price: np.ndarray

    def cost(self, pieces: Sequence[Sequence[int]]) -> float:
        return float(sum(self.price[self.has[list(p)].any(axis=0)].sum() for p in pieces))

    def fits(self, piece: Sequence[int]) -> bool:
        held = self.has[list(piece)].any(axis=0)
        return bool((self.taken[held].sum(axis=0) <= self.limits).all())

    def least(self) -> float:
        """No pieces cost less: a part is in as many as what hangs on it needs, where each holds all that is above."""
        inside = (~self.has).T.astype(np.int64) @ self.has == 0  # [p, q]: all items of q hold p
        above = inside.T
        total = inside.astype(np.int64) @ self.taken
        path = above.astype(np.int64) @ self.taken
        hanging = total - (inside & above).astype(np.int64) @ self.taken
        room = np.maximum(self.limits - path, 1)
        pieces = np.maximum(-(-hanging // room), 1).max(axis=1)
        return float(self.price @ pieces)


def cheapest(parts: Parts, found: Pieces, order: Sequence[int]) -> Pieces:
    """Pieces that fit, of the least price: exactly for few items, else no dearer than `found` and what else is tried.

    Args: `found`: pieces that fit. `order`: the items along the tree.
    """
    least = parts.least() * (1 + _SMALL)
    if parts.cost(found) <= least:
        return found
    if len(parts.has) <= EXACT:
        return _exactly(parts)
    tried = [found, _in_order(parts, order)]
    if len(parts.has) <= JOINED:
        tried.append(_joined(parts))
    # rounded, so that equal prices settle by the number of pieces, then by the first that was found
    return min(tried, key=lambda pieces: (float(f"{parts.cost(pieces):.12g}"), len(pieces)))


def _exactly(parts: Parts) -> Pieces:
    """The best of all partitions, by sets of items: the piece with a set's first item, and the best of the rest."""
    count = len(parts.has)
    held: np.ndarray = np.zeros((1 << count, parts.has.shape[1]), dtype=bool)
    for s in range(1, 1 << count):
        held[s] = held[s & (s - 1)] | parts.has[(s & -s).bit_length() - 1]
    fits = (held.astype(np.int64) @ parts.taken <= parts.limits).all(axis=1).tolist()
    price = (held @ parts.price).tolist()
    # price, pieces, the piece with the first item
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for s in range(1, 1 << count):
        first = s & -s
        others = s ^ first
        found, rest = (float("inf"), 0, 0), others
        # `rest`: items that are in other pieces than the first one, every subset of `others`
        while True:
            piece = s ^ rest
            if fits[piece]:
                cost, pieces, _ = best[rest]
                total = cost + price[piece]
                if total < found[0] - _SMALL * total or (
                    total <= found[0] + _SMALL * total and pieces + 1 < found[1]
                ):
                    found = (total, pieces + 1, piece)
            if not rest:
                break
            rest = (rest - 1) & others
        best.append(found)
    out, s = [], (1 << count) - 1
    while s:
        piece = best[s][2]
        out.append([i for i in range(count) if piece >> i & 1])
        s ^= piece
    return out


def _in_order(parts: Parts, order: Sequence[int]) -> Pieces:
    """Along the tree, a new piece where the next item does not fit."""
    out: Pieces = [[]]
    for item in order:
        if out[-1] and not parts.fits([*out[-1], item]):
            out.append([])
        out[-1].append(item)
    return [sorted(piece) for piece in out]


def _joined(parts: Parts) -> Pieces:
    """From single items on: the two pieces that save most by being one, while they fit into a bin."""
    pieces: Pieces = [[i] for i in range(len(parts.has))]
    held = parts.has.copy()
    saved = (held * parts.price) @ held.T.astype(np.float64)
    np.fill_diagonal(saved, 0.0)
    while True:
        a, b = divmod(int(np.argmax(saved)), len(pieces))
        if saved[a, b] <= 0:
            return [sorted(piece) for piece in pieces if piece]
        both = held[a] | held[b]
        if (parts.taken[both].sum(axis=0) > parts.limits).any():
            saved[a, b] = saved[b, a] = 0.0
            continue
        pieces[a] += pieces[b]
        pieces[b], held[b] = [], False
        held[a] = both
        saved[b] = saved[:, b] = 0.0
        # pairs that did not fit fit no better now
        row = (held * parts.price) @ both.astype(np.float64)
        row[a] = 0.0
        saved[a] = saved[:, a] = row
