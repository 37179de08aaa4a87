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

from mmpack.planning.balance import balance
from mmpack.planning.bfd import best_fit_decreasing, spread
from mmpack.planning.budgets import Budgets, OfMedium, media_of
from mmpack.planning.cost import CostModel
from mmpack.planning.counts import Counts, plain_counts, with_media
from mmpack.planning.cut import Parts, cheapest
from mmpack.planning.prefixes import SharedPrefixes
from mmpack.schema.sample import Sample

WORTH = 0.01  # of the slowest rank's time: groups are split where that saves more
FINENESS = (1.0, 0.5, 0.25)  # of a bin's mean cost: groups that cost more are split, step by step
CUTS = 16  # places along the tree that are tried to halve a group


@dataclass(frozen=True)
class Unit:
    """Samples and what they take together; media by cache key."""

    members: list[int]
    counts: Counts
    media: dict[str, OfMedium]
    share: bool

    @property
    def rows(self) -> int:
        return self.counts.rows

    @property
    def loss_tokens(self) -> int:
        return self.counts.loss_tokens

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


class Arranged(NamedTuple):
    bins: list[Unit]
    ranks: list[list[int]]  # bins of each
    costs: list[float]  # of each bin
    time: float  # of the slowest rank, by `CostModel`
    makespan_whole: (
        float  # what the slowest rank would cost if no group were split that a bin takes
    )

    @property
    def makespan(self) -> float:
        """What the slowest rank costs."""
        return max((sum(self.costs[b] for b in rank) for rank in self.ranks), default=0.0)


@dataclass(frozen=True)
class Work:
    """Measures units, splits groups, fills bins.

    `cost`: of a unit, any measure, by which ranks are balanced. `time`: seconds, by which bins share and groups are
    cut.
    """

    samples: list[Sample]
    budgets: Budgets
    shared: SharedPrefixes | None
    cost: Callable[[Unit], float]
    time: CostModel
    auto: bool = False
    keep_groups: bool = False

    def arranged(self, groups: list[list[int]], ranks: int) -> Arranged:
        """Groups to bins, bins to ranks: groups whole, or split where the slowest rank costs less by it.

        Bins stay empty where there are too few samples.
        """
        units = [piece for members in groups for piece in self.pieces(members)]
        best = self.placed(units, ranks)
        if ranks == 1:
            return best
        whole = self._whole(units, best, ranks)
        best = best._replace(makespan_whole=whole)
        if self.keep_groups:
            return best
        even = sum(map(self.cost, units)) / ranks
        count = len(units)
        for share in FINENESS:
            if best.makespan <= even * (1 + WORTH):
                break
            most = share * even * ranks / len(best.bins)
            units = [piece for u in units for piece in self.split(u, most)]
            if len(units) == count:
                continue
            count = len(units)
            found = self.placed(units, ranks)
            if found.makespan < best.makespan * (1 - WORTH):
                best = found._replace(makespan_whole=whole)
        return best

    def placed(self, units: list[Unit], ranks: int) -> Arranged:
        """Units to bins to ranks."""
        found = self.bins(units, ranks)
        bins = [sorted(i for u in b for i in u.members) for b in found]
        bins.sort(key=lambda members: (not members, members))
        measured = [self.laid_out(b) for b in bins]
        costs = [self.cost(u) if u.members else 0.0 for u in measured]
        ranked = balance(costs, ranks, equal_counts=True)
        times = [self.time.seconds(u.counts) for u in measured]
        slowest = max((sum(times[b] for b in rank) for rank in ranked), default=0.0)
        made = Arranged(measured, ranked, costs, slowest, 0.0)
        return made._replace(makespan_whole=made.makespan)

    def _whole(self, units: list[Unit], placed: Arranged, ranks: int) -> float:
        """What the slowest rank costs where no unit is split: ranks are idle where there are too few of them."""
        if len(units) >= len(placed.bins):
            return placed.makespan
        costs = [self.cost(u) for u in units]
        return max(sum(costs[i] for i in rank) for rank in balance(costs, ranks))

    def unit(self, members: list[int]) -> Unit:
        chosen = [self.samples[i] for i in members]
        media = {k: v for s in chosen for k, v in media_of(s).items()}
        if self.shared is not None:
            return self._unit(members, self.shared.counts(members), media, True)
        lengths = [len(s) for s in chosen]
        return self._unit(members, plain_counts(lengths, self.time.spans), media, False)

    def _unit(
        self, members: list[int], counts: Counts, media: dict[str, OfMedium], share: bool
    ) -> Unit:
        loss = sum(self.samples[i].num_loss_tokens for i in members)
        kinds = ((m.modality, m.grid) for m in media.values())
        counts = with_media(counts, kinds, self.time.spans)._replace(loss_tokens=loss)
        return Unit(members, counts, media, share)

    def laid_out(self, members: list[int]) -> Unit:
        """A bin. With `auto` it is plain where sharing does not pay and its rows fit."""
        bin = self.unit(members)
        if not (self.auto and bin.share):
            return bin
        lengths = [len(self.samples[i]) for i in members]
        plain = self._unit(members, plain_counts(lengths, self.time.spans), bin.media, False)
        fits = plain.rows <= self.budgets.max_tokens
        if not fits or self.time.sharing_pays(plain.counts, bin.counts):
            return bin
        return plain

    def pieces(self, group: list[int]) -> list[Unit]:
        """The group in one unit if a bin takes it, else in the pieces that repeat least."""
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
        found = best_fit_decreasing(sizes, capacity, parts)
        order = self._along(group)
        pieces = cheapest(self._parts(group, names), found, [group.index(i) for i in order])
        return [self.unit(sorted(group[i] for i in b)) for b in pieces]

    def _parts(self, group: list[int], names: list[str]) -> Parts:
        """What the samples of a group hold, in the budgets `names`."""
        spans = self.time.spans
        taken: dict[str, list[int]] = {}
        prices: dict[str, float] = {}
        holders: dict[str, list[int]] = {}

        def hold(at: int, key: str, counts: Counts, **budgets: int) -> None:
            taken.setdefault(key, [budgets.get(name, 0) for name in names])
            prices.setdefault(key, self.time.seconds(counts._replace(batches=0)))
            holders.setdefault(key, []).append(at)

        for at, i in enumerate(group):
            sample = self.samples[i]
            loss = sample.num_loss_tokens
            own = Counts(loss_tokens=loss)
            hold(at, f"sample {at}", own, max_samples=1, max_loss_tokens=loss)
            for key, m in media_of(sample).items():
                seen = with_media(Counts(), [(m.modality, m.grid)], spans)
                hold(at, f"medium {key}", seen, max_patches=m.patches, max_media_bytes=m.bytes)
            if self.shared is None:
                rows = plain_counts([len(sample)], spans)
                hold(at, f"rows {at}", rows, max_tokens=rows.rows)
                continue
            for g in self.shared.path[i]:
                rows = self.shared.segment(g)
                hold(at, f"segment {g}", rows, max_tokens=rows.rows)
        has: np.ndarray = np.zeros((len(group), len(taken)), dtype=bool)
        for part, items in enumerate(holders.values()):
            has[items, part] = True
        limits = np.array([getattr(self.budgets, name) for name in names], dtype=np.int64)
        return Parts(has, np.array(list(taken.values())), limits, np.array(list(prices.values())))

    def _along(self, members: list[int]) -> list[int]:
        """In the order of their tree, in which what shares most lies together."""
        return members if self.shared is None else sorted(members, key=self.shared.path.__getitem__)

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

    def bins(self, units: list[Unit], ranks: int) -> list[list[Unit]]:
        """Bins of units, a multiple of `ranks`; the last ones empty where samples are fewer than bins."""
        names = self.binding(units) or ["max_tokens"]
        sizes, capacity, parts = self.measured(units, names)
        if len(names) == 1 and names[0] not in OF_MEDIA:
            packed = best_fit_decreasing(sizes[:, 0], capacity[0])
        else:
            packed = best_fit_decreasing(sizes, capacity, parts)
        wanted = -(-len(packed) // ranks) * ranks
        if ranks == 1 or not units:
            return [[units[i] for i in b] for b in packed]
        loads = np.array([self.cost(u) for u in units])
        if len(units) < wanted:
            halved = _halve(units, wanted, self.cost, self.halves)
            idle: list[list[Unit]] = [[] for _ in range(wanted - len(halved))]
            return [[u] for u in halved] + idle
        even = spread(sizes, capacity, loads, wanted, parts)
        if even is None or not all(even):
            even = _halve(
                packed,
                wanted,
                lambda b: float(loads[b].sum()),
                lambda b: [[b[i] for i in half] for half in _two(loads[b])],
            )
        return [[units[i] for i in b] for b in even]

    def split(self, unit: Unit, most: float) -> list[Unit]:
        """Halves of halves, until each costs at most so much or is one sample."""
        if len(unit.members) == 1 or self.cost(unit) <= most:
            return [unit]
        return [piece for half in self.halves(unit) for piece in self.split(half, most)]

    def halves(self, unit: Unit) -> list[Unit]:
        """Two units that minimise the larger of the two costs: of like load, or cut at a place along the tree."""
        if len(unit.members) == 1:
            return [unit]
        two = _two([self.cost(self.unit([i])) for i in unit.members])
        tried = [[[unit.members[i] for i in half] for half in two]]
        if self.shared is not None:
            along = self._along(unit.members)
            places = np.linspace(1, len(along) - 1, min(CUTS, len(along) - 1)).round()
            tried += [[sorted(along[:k]), sorted(along[k:])] for k in map(int, places)]
        made = [[self.unit(half) for half in halves] for halves in tried]

        def price(halves: list[Unit]) -> tuple[float, float]:
            costs = [self.cost(u) for u in halves]
            return max(costs), sum(costs)

        return min(made, key=price)


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
