"""Units to bins to ranks: what a bin holds, what it costs, how groups are cut for it.

A unit is what stays in one bin: a group, or a piece of a group that no bin takes whole. Indices are
those of `samples`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from mmpack.errors import PlanError, check_number
from mmpack.layout.forest import build_forest
from mmpack.planning.balance import balance
from mmpack.planning.bfd import best_fit_decreasing, spread
from mmpack.planning.budgets import Budgets, OfMedium, media_of
from mmpack.planning.cost import (
    Cost,
    Layout,
    LayoutCost,
    plain_layout,
    shared_layout,
    waves_of,
)
from mmpack.schema.sample import Sample


@dataclass(frozen=True)
class Unit:
    """Samples and what they take together, in a layout of planning/cost.py; media by cache key."""

    members: list[int]
    layout: Layout
    media: dict[str, OfMedium]
    loss_tokens: int
    share: bool

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def patches(self) -> int:
        return sum(m.patches for m in self.media.values())

    @property
    def media_bytes(self) -> int:
        return sum(m.bytes for m in self.media.values())


# what `Budgets` bounds, of a unit
TAKEN: dict[str, Callable[[Unit], int]] = {
    "max_tokens": lambda u: u.rows,
    "max_patches": lambda u: u.patches,
    "max_samples": lambda u: len(u.members),
    "max_loss_tokens": lambda u: u.loss_tokens,
    "max_media_bytes": lambda u: u.media_bytes,
}
OF_MEDIA = {"max_patches": "patches", "max_media_bytes": "bytes"}


class TooFew(NamedTuple):
    """Why no bins were found: `samples` can't make `wanted`."""

    samples: int
    wanted: int

    def error(self, ranks: int) -> PlanError:
        return PlanError(
            f"plan: {self.samples} samples can't make {self.wanted} micro-batches, the next "
            f"multiple of {ranks} ranks within the budgets. Fix: pass a multiple of {ranks} "
            "samples, which is always enough"
        )


class Arranged(NamedTuple):
    bins: list[Unit]
    ranks: list[list[int]]  # bins of each
    costs: list[float]  # of each bin
    time: float  # of the slowest rank, by `LayoutCost`


class SharedPrefixes:
    """The prefix forest of all samples, built once: that of some of them is made of the segments on their paths."""

    def __init__(self, samples: list[Sample], kept: list[int]):
        forest = build_forest([samples[i] for i in kept])
        start = forest.segment_depth
        stop = start + np.diff(forest.segment_offsets)
        self.start: list[int] = start.tolist()  # depths, of each segment
        self.stop: list[int] = stop.tolist()
        self.parent: list[int] = forest.segment_parent.tolist()
        self.wave = waves_of(self.parent)
        self.path = {i: forest.path(k) for k, i in enumerate(kept)}

    def rows(self, segment: int) -> int:
        return self.stop[segment] - self.start[segment]

    def layout(self, members: list[int]) -> Layout:
        segments = {g for i in members for g in self.path[i]}
        above = {self.parent[g] for g in segments}
        return shared_layout(
            [self.start[g] for g in segments],
            [self.stop[g] for g in segments],
            [g not in above for g in segments],
            max((self.wave[g] for g in segments), default=1),
        )


@dataclass(frozen=True)
class Work:
    """Measures units, splits groups, fills bins."""

    samples: list[Sample]
    budgets: Budgets
    shared: SharedPrefixes | None
    cost: Cost
    auto: bool = False
    time: LayoutCost = LayoutCost()

    def arranged(self, groups: list[list[int]], ranks: int) -> Arranged | TooFew:
        """Groups to bins, bins to ranks."""
        units = [piece for members in groups for piece in self.pieces(members)]
        found = self.bins(units, ranks)
        if isinstance(found, TooFew):
            return found
        bins = sorted(sorted(i for u in b for i in u.members) for b in found)
        measured = [self.laid_out(b) for b in bins]
        costs = [self.cost_of(u) for u in measured]
        ranked = balance(costs, ranks, equal_counts=True)
        times = [self.time(u.layout, u.patches) for u in measured]
        slowest = max((sum(times[b] for b in rank) for rank in ranked), default=0.0)
        return Arranged(measured, ranked, costs, slowest)

    def unit(self, members: list[int]) -> Unit:
        chosen = [self.samples[i] for i in members]
        media = {k: v for s in chosen for k, v in media_of(s).items()}
        loss = sum(s.num_loss_tokens for s in chosen)
        if self.shared is not None:
            return Unit(members, self.shared.layout(members), media, loss, True)
        return Unit(members, plain_layout([len(s) for s in chosen]), media, loss, False)

    def laid_out(self, members: list[int]) -> Unit:
        """A bin. With `auto` it is plain where sharing does not pay and its rows fit."""
        bin = self.unit(members)
        if not (self.auto and bin.share):
            return bin
        plain = plain_layout([len(self.samples[i]) for i in members])
        if plain.rows > self.budgets.max_tokens or self.time.sharing_pays(plain, bin.layout):
            return bin
        return replace(bin, layout=plain, share=False)

    def cost_of(self, unit: Unit) -> float:
        rows, pairs, *_ = unit.layout
        cost = self.cost(rows, pairs, unit.patches)
        where = f"cost({rows}, {pairs}, {unit.patches})"
        check_number(
            "plan", where, cost, least=0, fix="return what a micro-batch takes, in any unit"
        )
        return float(cost)

    def pieces(self, group: list[int]) -> list[Unit]:
        """The group in one unit if a bin takes it, else in as few as best-fit-decreasing finds."""
        whole = self.unit(group)
        names = self.binding([whole])
        if not names:
            return [whole]
        plain = replace(self, shared=None)
        sizes, capacity, parts = self.measured([plain.unit([i]) for i in group], names)
        if self.shared is not None and "max_tokens" in names:
            at = names.index("max_tokens")
            for i, part in zip(group, parts, strict=True):
                part += [(f"segment {g}", at, self.shared.rows(g)) for g in self.shared.path[i]]
        bins = best_fit_decreasing(sizes, capacity, parts)
        return [self.unit(sorted(group[i] for i in b)) for b in bins]

    def binding(self, units: list[Unit]) -> list[str]:
        """The budgets that all of `units` in one bin would exceed."""
        return [
            name
            for name, taken in TAKEN.items()
            if (most := getattr(self.budgets, name)) is not None and sum(map(taken, units)) > most
        ]

    def measured(
        self, units: list[Unit], names: list[str]
    ) -> tuple[np.ndarray, list[int], list[list[tuple[str, int, int]]]]:
        """Sizes [n, D], capacities [D] and shared parts of units, of the budgets `names`."""
        sizes = np.array([[TAKEN[name](u) for name in names] for u in units], dtype=np.int64)
        of_media = [(d, OF_MEDIA[name]) for d, name in enumerate(names) if name in OF_MEDIA]
        parts = [
            [
                (key, d, getattr(medium, field))
                for key, medium in u.media.items()
                for d, field in of_media
            ]
            for u in units
        ]
        return (
            sizes.reshape(len(units), len(names)),
            [getattr(self.budgets, name) for name in names],
            parts,
        )

    def bins(self, units: list[Unit], ranks: int) -> list[list[Unit]] | TooFew:
        """Bins of units, a multiple of `ranks`."""
        names = self.binding(units) or ["max_tokens"]
        sizes, capacity, parts = self.measured(units, names)
        if len(names) == 1 and names[0] not in OF_MEDIA:
            packed = best_fit_decreasing(sizes[:, 0], capacity[0])
        else:
            packed = best_fit_decreasing(sizes, capacity, parts)
        wanted = -(-len(packed) // ranks) * ranks
        if ranks == 1 or not units:
            return [[units[i] for i in b] for b in packed]
        loads = np.array([self.cost_of(u) for u in units])
        if len(units) < wanted:
            halved = _halve(units, wanted, self.cost_of, self._halves)
            if len(halved) < wanted:
                return TooFew(len(halved), wanted)
            return [[u] for u in halved]
        even = spread(sizes, capacity, loads, wanted, parts)
        if even is None or not all(even):
            even = _halve(
                packed,
                wanted,
                lambda b: float(loads[b].sum()),
                lambda b: [[b[i] for i in half] for half in _two(loads[b])],
            )
        return [[units[i] for i in b] for b in even]

    def _halves(self, unit: Unit) -> list[Unit]:
        halves = _two([self.cost_of(self.unit([i])) for i in unit.members])
        return [self.unit([unit.members[i] for i in half]) for half in halves]


def _two(loads: Sequence[float] | np.ndarray) -> list[list[int]]:
    """Indices in two halves of like load, none of them empty; a single index stays one."""
    return balance(loads, 2, equal_counts=True) if len(loads) > 1 else [[0]]


_Piece = TypeVar("_Piece")


def _halve(
    pieces: list[_Piece],
    wanted: int,
    load: Callable[[_Piece], float],
    halves: Callable[[_Piece], list[_Piece]],
) -> list[_Piece]:
    """Halve the costliest piece until there are as many as `wanted`, or none can be halved."""
    heap = [(-load(p), i, p) for i, p in enumerate(pieces)]
    heapq.heapify(heap)
    whole: list[_Piece] = []
    count = len(pieces)
    while heap and len(heap) + len(whole) < wanted:
        piece = heapq.heappop(heap)[2]
        two = halves(piece)
        if len(two) < 2:
            whole.append(piece)
            continue
        for half in two:
            heapq.heappush(heap, (-load(half), count, half))
            count += 1
    return whole + [p for _, _, p in heap]
