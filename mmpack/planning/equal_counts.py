"""Costs on ranks with equal counts: differencing and exchanges on a matrix, [ranks, m] items, a row per rank.

Where the items are no multiple of the ranks, items of cost 0 fill it up, at most one per rank: who has one has an item
less. They stay where they are.
"""

from __future__ import annotations

import heapq

import numpy as np

PARTNERS = 8
PAIRED = 64  # items per rank, up to which `exchanged` compares all pairs of two ranks' items


def equal_parts(values: np.ndarray, ranks: int) -> tuple[list[np.ndarray], bool]:
    """The items of each rank, of `values` [n] (n > 0), and whether `exchanged` has been over them."""
    count = len(values)
    filled = np.append(values, np.zeros(-count % ranks))
    items = differenced(filled, ranks)
    few = items.shape[1] <= PAIRED
    if few and ranks > 1:
        items = exchanged(filled, items, None if count == items.size else items < count)
    return [row[row < count] for row in items], few


def differenced(values: np.ndarray, ranks: int) -> np.ndarray:
    """int64 [ranks, m]: `values` [ranks · m] in tuples of one item per rank, by size; the two of largest spread are
    joined, heaviest slot to lightest, until one is left.
    """
    order = np.argsort(-values, kind="stable")
    count = len(values) // ranks
    # slots are numbered, tuple by tuple, and those of a join after those before it; each goes into one of a later join
    into = np.zeros((2 * count - 1) * ranks, np.int64)
    slots = np.arange(len(into)).reshape(-1, ranks)
    # ascending sums and their slots
    tuples = values[order].reshape(count, ranks)[:, ::-1]
    states = [(sums, own) for sums, own in zip(tuples, slots[:count, ::-1], strict=True)]
    heap = [(*_spread(sums), n) for n, (sums, _) in enumerate(states)]
    heapq.heapify(heap)
    for number in range(count, 2 * count - 1):
        first, second = (states[heapq.heappop(heap)[2]] for _ in range(2))
        sums = first[0] + second[0][::-1]
        rising = np.argsort(sums, kind="stable")
        new = slots[number]
        into[first[1][rising]] = into[second[1][::-1][rising]] = new
        states.append((sums[rising], new))
        heapq.heappush(heap, (*_spread(states[-1][0]), number))
    rank = np.empty(len(into), np.int64)
    rank[slots[-1]] = np.arange(ranks)
    for own in slots[-2 : count - 1 : -1]:
        rank[own] = rank[into[own]]
    leaves = rank[into[: len(values)]] if count > 1 else rank
    return order[np.argsort(leaves, kind="stable")].reshape(ranks, count)


def _spread(sums: np.ndarray) -> tuple[float, float]:
    return float(sums[0] - sums[-1]), -float(sums[-1])


def exchanged(values: np.ndarray, items: np.ndarray, real: np.ndarray | None) -> np.ndarray:
    """`items` [ranks, m] after exchanges of one item for another that lower the largest sum: first between the heaviest
    and the lightest, the second heaviest and the second lightest, …, at once; then between the heaviest and some of the
    lightest.

    Args: `real`: bool [ranks, m], items that may be exchanged; None: all.

    Each exchange lowers the sum of squares, so this ends; the bounds on rounds only bound the time.
    """
    items = items.copy()
    costs = values[items]
    sums = costs.sum(axis=1)
    smallest = 1e-12 * sums.max()  # a smaller gain is rounding
    half = min(len(items) // 2, max(1, 2**22 // items.shape[1] ** 2))  # of memory
    for _ in range(len(items)):
        rising = np.argsort(sums, kind="stable")
        before = sums[rising[-1]]
        light, heavy = rising[:half], rising[::-1][:half]
        gap = sums[heavy] - sums[light]
        far = gap > gap.max(initial=0.0) / 4  # the others can wait
        light, heavy, gap = light[far], heavy[far], gap[far]
        give, take, change = _nearest(*_offered(costs, real, heavy, light), gap)
        gains = (change > smallest) & (change < gap - smallest)
        _swap(items, costs, sums, (heavy[gains], give[gains]), (light[gains], take[gains]))
        if not sums.max() < before:
            break
    for _ in range(items.size):
        heavy = np.asarray(sums.argmax())
        light = np.argsort(sums, kind="stable")[:PARTNERS]
        gap = sums[heavy] - sums[light]
        give, take, change = _nearest(*_offered(costs, real, heavy[None], light), gap)
        gains = (change > smallest) & (change < gap - smallest)
        if not gains.any():
            break
        k = np.where(gains, np.abs(change - gap / 2), np.inf).argmin()
        _swap(items, costs, sums, (heavy, give[k]), (light[k], take[k]))
    return items


def _offered(
    costs: np.ndarray, real: np.ndarray | None, heavy: np.ndarray, light: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Costs of the rows `heavy` and `light`; padding (not `real`) gets a cost that no swap can reach."""
    if real is None:
        return costs[heavy], costs[light]
    return np.where(real[heavy], costs[heavy], -np.inf), np.where(real[light], costs[light], np.inf)


def _nearest(
    heavy: np.ndarray, light: np.ndarray, gap: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each pair of rows [P, m], the exchange that brings their sums nearest together: places of both items, and
    what goes over. One row `heavy` is paired with each of `light`.
    """
    off = (heavy - gap[:, None] / 2)[:, :, None] - light[:, None, :]
    np.abs(off, out=off)
    pair = np.arange(len(light))
    give, take = np.divmod(
        off.reshape(len(light), -1 if len(light) else 1).argmin(axis=1), light.shape[1]
    )
    return give, take, np.broadcast_to(heavy, light.shape)[pair, give] - light[pair, take]


def _swap(
    items: np.ndarray,
    costs: np.ndarray,
    sums: np.ndarray,
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
) -> None:
    """Exchange what stands at the places (rows, columns) `first` and `second`."""
    for table in (items, costs):
        table[first], table[second] = table[second], table[first]
    for row in (first[0], second[0]):
        sums[row] = costs[row].sum(axis=-1)
