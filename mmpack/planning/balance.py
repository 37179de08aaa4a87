"""Costs on ranks, so that the largest sum is small: largest differencing, then exchanges.

n costs, not negative, of any unit, in float64 (integers up to 2^53 stay exact).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.planning.equal_counts import equal_parts


def balance(
    costs: Sequence[float] | np.ndarray, ranks: int, equal_counts: bool = False
) -> list[list[int]]:
    """Indices of `costs` on each of `ranks` ranks, ascending; ranks in order of their first index.

    Args: `costs`: [n] finite, not negative. `equal_counts`: the ranks' numbers of items differ by
    one at most. Source: Karmarkar and Karp 1982, "The differencing method of set partitioning";
    with equal counts, of tuples of one item per rank, as in Michiels et al. 2003, "Performance ratios
    for the differencing method applied to the balanced number partitioning problem".
    Raises ArgumentError.
    """
    values = np.asarray(costs, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ArgumentError(
            f"balance: costs, of shape {list(values.shape)}, must be [n], finite and not negative. "
            "Fix: pass one cost per item"
        )
    if ranks < 1:
        raise ArgumentError(f"balance: ranks is {ranks}, expected 1 or more. Fix: pass 1 or more")
    if not len(values):
        return [[] for _ in range(ranks)]
    if equal_counts:
        parts, done = equal_parts(values, ranks)
    else:
        parts, done = _largest_differencing(values.tolist(), ranks), False
    if not done:
        parts = _exchange(values, parts, equal_counts)
    parts = [part.tolist() for part in parts]
    return sorted(map(sorted, parts), key=lambda part: part[0] if part else len(values))


_PARTNERS = 32  # lightest parts that the heaviest one tries
_Slot = tuple[float, int, list[int]]  # sum, a number that settles ties, items


def _largest_differencing(values: list[float], ranks: int) -> list[np.ndarray]:
    """The two partial partitions of largest spread are joined, heaviest slot to lightest, until one
    is left.

    A partial partition is a list of `ranks` slots, ascending; a single item stays a number until
    it is joined.
    """
    descending = sorted(range(len(values)), key=lambda i: (-values[i], i))
    # spread, largest sum (both negated); sorted, so a heap
    heap: list[tuple[float, float, int, int | list[_Slot]]]
    heap = [(-values[i], -values[i], n, i) for n, i in enumerate(descending)]
    for number in range(len(values), 2 * len(values) - 1):
        first, second = heapq.heappop(heap)[3], heapq.heappop(heap)[3]
        if isinstance(first, int):
            first, second = second, first
        slots = _slots(values, first, ranks) if isinstance(first, int) else first
        if isinstance(second, int):
            total, tie, items = slots.pop(0)
            items.append(second)
            insort(slots, (total + values[second], tie, items))
        else:
            pairs = zip(slots, reversed(second), strict=True)
            slots = sorted((a[0] + b[0], a[1], a[2] + b[2]) for a, b in pairs)
        heapq.heappush(heap, (*_spread(slots), number, slots))
    last = heap[0][3]
    found = _slots(values, last, ranks) if isinstance(last, int) else last
    return [np.array(items, np.int64) for _, _, items in found]


def _spread(slots: list[_Slot]) -> tuple[float, float]:
    return slots[0][0] - slots[-1][0], -slots[-1][0]


def _slots(values: list[float], item: int, ranks: int) -> list[_Slot]:
    """A partial partition of one item; the other slots are empty."""
    empty: list[_Slot] = [(0.0, n, []) for n in range(1, ranks)]
    return sorted([*empty, (values[item], 0, [item])])


def _exchange(values: np.ndarray, parts: list[np.ndarray], equal_counts: bool) -> list[np.ndarray]:
    """Lower the heaviest part while one exchange of items with another part does so.

    Each exchange lowers the sum of squares, so this ends; the bound on rounds only bounds the
    time.
    """
    members = list(parts)
    sums = np.array([values[m].sum() for m in members])
    # a smaller gain is rounding
    smallest = 1e-12 * sums.max()
    for _ in range(4 * len(values)):
        heavy = int(np.argmax(sums))
        for light in np.argsort(sums, kind="stable")[:_PARTNERS].tolist():
            gap = sums[heavy] - sums[light]
            if gap <= smallest:
                continue
            found = _best_pair(values, members[heavy], members[light], gap, smallest, equal_counts)
            if found is not None:
                members[heavy], members[light] = found
                sums[[heavy, light]] = values[found[0]].sum(), values[found[1]].sum()
                break
        else:
            break
    return members


def _best_pair(
    values: np.ndarray,
    heavy: np.ndarray,
    light: np.ndarray,
    gap: float,
    smallest: float,
    equal_counts: bool,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Both parts after the exchange that brings their sums nearest to each other; None if there is
    no gain.

    With unequal counts an item may also go over for nothing: price 0.
    """
    light = light[np.argsort(values[light], kind="stable")]
    prices = values[light] if equal_counts else np.concatenate([[0.0], values[light]])
    if not len(prices):
        return None
    wanted = values[heavy] - gap / 2
    above = np.searchsorted(prices, wanted)
    below, above = np.maximum(above - 1, 0), np.minimum(above, len(prices) - 1)
    nearer = np.abs(prices[above] - wanted) < np.abs(prices[below] - wanted)
    nearest = np.where(nearer, above, below)
    change = values[heavy] - prices[nearest]
    give = int(np.argmin(np.abs(change - gap / 2)))
    if not smallest < change[give] < gap - smallest:
        return None
    take = int(nearest[give]) - (0 if equal_counts else 1)
    back = light[take : take + 1] if take >= 0 else light[:0]
    lighter = np.append(np.delete(heavy, give), back)
    heavier = np.append(light[light != back[0]] if len(back) else light, heavy[give])
    return lighter, heavier
