"""Bins of bounded size: best-fit-decreasing, in one dimension on a histogram of sizes.

n items, D capacities (rows, patches, samples), integer sizes. Ties: the item that comes first goes
first, into the bin that was opened first (in one dimension: that has had its free space longest).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence

import numpy as np

from mmpack.errors import PlanError

Parts = Sequence[Sequence[tuple[Hashable, int, int]]]  # of each item: (key, dimension, size)


def best_fit_decreasing(
    sizes: Sequence[int] | np.ndarray, capacity: int | Sequence[int], parts: Parts | None = None
) -> list[list[int]]:
    """Indices of the items of each bin, in order of placing; every item goes to the fullest bin
    that takes it.

    Args: `sizes`: int [n] with `capacity` an int, or [n, D] with D capacities; in [n, D] the
    largest share of a capacity decides the order, and the sum of free shares which bin is fullest.
    `parts`: shared content that `sizes` include; a bin counts items of one key once, and a bin
    that has an item's parts comes first. Raises PlanError if an item exceeds a capacity.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    capacities = np.atleast_1d(np.asarray(capacity, dtype=np.int64))
    columns = sizes if sizes.ndim == 2 else sizes[:, None]
    over = np.flatnonzero((columns > capacities).any(axis=1))
    if len(over):
        raise PlanError(
            f"best_fit_decreasing: sizes[{over[0]}] is {sizes[over[0]].tolist()}, but the capacity is {capacity}. "
            "Fix: raise the capacity, or leave the item out"
        )
    if sizes.ndim == 1 and parts is None:
        return _by_histogram(sizes, int(capacities[0]))
    bins = Bins(columns, capacities, parts)
    shares = (bins.sizes / bins.scale).max(axis=1, initial=0.0)
    order = np.argsort(-shares, kind="stable")
    if not any(bins.parts):
        return _by_scan(columns, capacities, order)
    for item in order.tolist():
        fitting, saved = bins.fitting(item)
        if not len(fitting):
            bins.place(item, bins.open())
            continue
        free = bins.free_share[fitting]
        if saved is not None:
            # a bin with the item's parts comes first
            free = free - 2.0 * len(capacities) * saved
        bins.place(item, int(fitting[np.argmin(free)]))
    return bins.items


def spread(
    sizes: np.ndarray,
    capacity: Sequence[int],
    loads: np.ndarray,
    count: int,
    parts: Parts | None = None,
) -> list[list[int]] | None:
    """`count` bins of like load: heaviest item first, each into the lightest bin that takes it;
    None if one finds no bin.

    Args: `sizes`: int [n, D]; `loads`: float [n]. Source: Graham 1969, "Bounds on multiprocessing
    timing anomalies".
    """
    bins = Bins(sizes, np.asarray(capacity, dtype=np.int64), parts)
    for _ in range(count):
        bins.open()
    load = np.zeros(count)
    for item in np.argsort(-loads, kind="stable").tolist():
        fitting, _ = bins.fitting(item)
        if not len(fitting):
            return None
        chosen = int(fitting[np.argmin(load[fitting])])
        load[chosen] += loads[item]
        bins.place(item, chosen)
    return bins.items


class Bins:
    """Open bins of D capacities, with what is free in each and who holds which shared part."""

    def __init__(self, sizes: np.ndarray, capacities: np.ndarray, parts: Parts | None):
        self.sizes = sizes
        self.capacities = capacities
        self.scale = np.maximum(capacities, 1).astype(np.float64)
        self.items: list[list[int]] = []
        self.free: np.ndarray = np.zeros((len(capacities), 8), dtype=np.int64)
        self.free_share: np.ndarray = np.zeros(8)
        count = Counter(key for item in parts or () for key, _, _ in item)
        self.parts = [[p for p in item if count[p[0]] > 1] for item in parts or [()] * len(sizes)]
        self.holders: dict[Hashable, list[int]] = defaultdict(list)

    def open(self) -> int:
        bin = len(self.items)
        if bin == len(self.free_share):
            self.free = np.concatenate([self.free, np.zeros_like(self.free)], axis=1)
            self.free_share = np.concatenate([self.free_share, np.zeros_like(self.free_share)])
        self.items.append([])
        self.free[:, bin] = self.capacities
        self.free_share[bin] = len(self.capacities)
        return bin

    def fitting(self, item: int) -> tuple[np.ndarray, np.ndarray | None]:
        """int64 [f]: the bins that take the item; float64 [f]: the share of the capacities that its
        parts save there.
        """
        free = self.free[:, : len(self.items)]
        saved = None
        if self.parts[item]:
            saved = np.zeros_like(free)
            for key, dimension, size in self.parts[item]:
                saved[dimension, self.holders[key]] += size
            free = free + saved
        fits = free[0] >= self.sizes[item, 0]
        for dimension in range(1, len(free)):
            fits &= free[dimension] >= self.sizes[item, dimension]
        fitting = np.flatnonzero(fits)
        return fitting, None if saved is None else (saved[:, fitting].T / self.scale).sum(axis=1)

    def place(self, item: int, bin: int) -> None:
        self.items[bin].append(item)
        self.free[:, bin] -= self.sizes[item]
        for key, dimension, size in self.parts[item]:
            if bin in self.holders[key]:
                self.free[dimension, bin] += size
            else:
                self.holders[key].append(bin)
        self.free_share[bin] = (self.free[:, bin] / self.scale).sum()


def _by_histogram(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Items of one size go together: the fullest bin that takes one is so until it takes no more."""
    bins: list[list[int]] = []
    spaces: list[int] = []  # free spaces that occur, ascending
    bins_of: dict[int, deque[list[int]]] = {}  # by free space, first in first out

    def keep(bin: list[int], space: int) -> None:
        if space not in bins_of:
            bins_of[space] = deque()
            insort(spaces, space)
        bins_of[space].append(bin)

    order = np.argsort(-sizes, kind="stable")
    values, starts = np.unique(-sizes[order], return_index=True)
    edges = np.append(starts, len(order)).tolist()
    indices = order.tolist()
    for size, start, stop in zip((-values).tolist(), edges[:-1], edges[1:], strict=True):
        while start < stop:
            bin: list[int]
            at = bisect_left(spaces, size)
            if at == len(spaces):
                space = capacity
                bins.append(bin := [])
            else:
                space = spaces[at]
                bin = bins_of[space].popleft()
                if not bins_of[space]:
                    del bins_of[space], spaces[at]
            taken = min(stop - start, space // size) if size else stop - start
            bin += indices[start : start + taken]
            keep(bin, space - taken * size)
            start += taken
    return bins


def _by_scan(sizes: np.ndarray, capacities: np.ndarray, order: np.ndarray) -> list[list[int]]:
    """Without shared parts: the bins that could still take one of the items to come, searched by numpy."""
    bins: list[list[int]] = []
    count, dimensions = 0, range(len(capacities))
    scale = np.maximum(capacities, 1).astype(np.float64)
    # few lists: the garbage collector looks through all objects after so many new ones
    shares, needs = scale.tolist(), sizes.T.tolist()
    least = np.minimum.accumulate(sizes[order][::-1], axis=0)[::-1]  # of each item and those after
    narrow = capacities.max(initial=0) <= np.iinfo(np.int32).max  # half the bytes to search
    free: np.ndarray = np.zeros((len(capacities), 64), np.int32 if narrow else np.int64)
    # of the bins in the search, rising
    free_share: np.ndarray = np.zeros(64)
    index: np.ndarray = np.zeros(64, dtype=np.int64)
    for number, item in enumerate(order.tolist()):
        if number % 1024 == 0 and count:
            kept = np.flatnonzero((free[:, :count] >= least[number][:, None]).all(axis=0))
            count = len(kept)
            free[:, :count], free_share[:count], index[:count] = (
                free[:, kept],
                free_share[kept],
                index[kept],
            )
        need = [of_all[item] for of_all in needs]
        fits = free[0, :count] >= need[0]
        for d in dimensions[1:]:
            fits &= free[d, :count] >= need[d]
        fitting = fits.nonzero()[0]
        if len(fitting):
            at = int(fitting[free_share.take(fitting).argmin()])
        else:
            if count == len(index):
                free = np.concatenate([free, free], axis=1)
                free_share, index = np.tile(free_share, 2), np.tile(index, 2)
            at = count
            count += 1
            free[:, at], index[at] = capacities, len(bins)
            bins.append([])
        bins[index[at]].append(item)
        share = 0.0
        for d in dimensions:
            left = int(free[d, at]) - need[d]
            free[d, at] = left
            share += left / shares[d]
        free_share[at] = share
    return bins
