"""balance against the exact optimum by enumeration, longest-processing-time-first, and known bounds."""

import heapq
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.planning.balance import _PARTNERS, _best_pair, balance
from mmpack.planning.equal_counts import differenced, equal_parts


def least_largest(costs, ranks, equal_counts):
    """The smallest possible largest sum, by trying every assignment."""
    best = float("inf")
    for assignment in product(range(ranks), repeat=len(costs)):
        counts = np.bincount(assignment, minlength=ranks)
        if not equal_counts or counts.max() - counts.min() <= 1:
            best = min(best, np.bincount(assignment, weights=costs, minlength=ranks).max())
    return best


def longest_first(costs, ranks):
    """Graham's rule: the largest sum."""
    heap = [0.0] * ranks
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


@given(
    st.lists(st.integers(0, 50) | st.floats(0, 1e9), max_size=40), st.integers(1, 9), st.booleans()
)
def test_every_item_is_on_one_rank(costs, ranks, equal_counts):
    parts = balance(costs, ranks, equal_counts)
    assert len(parts) == ranks and all(p == sorted(p) for p in parts)
    assert sorted(i for p in parts for i in p) == list(range(len(costs)))
    counts = [len(p) for p in parts]
    assert not equal_counts or max(counts) - min(counts) <= 1
    assert balance(np.array(costs), ranks, equal_counts) == parts


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("n", "ranks"), [(9, 2), (7, 3)])
def test_small_cases_are_near_the_optimum(n, ranks, equal_counts):
    random = np.random.default_rng(n)
    ours = best = 0.0
    for _ in range(8):
        costs = random.integers(1, 100, n)
        found = max(costs[p].sum() for p in balance(costs, ranks, equal_counts))
        optimum = least_largest(costs, ranks, equal_counts)
        # Karmarkar-Karp's own bounds: 7/6 for two parts, 4/3 for more
        assert optimum <= found <= (7 / 6 if ranks == 2 else 4 / 3) * optimum
        ours, best = ours + found, best + optimum
    assert ours <= 1.03 * best


@pytest.mark.parametrize("equal_counts", [False, True])
def test_large_cases_are_even(equal_counts, n=1024, ranks=32):
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(7, 1, n), 16, 16_384).astype(np.int64)
    largest = max(lengths[p].sum() for p in balance(lengths, ranks, equal_counts))
    assert largest <= longest_first(lengths, ranks)
    assert largest <= lengths.sum() / ranks * (1 + 1e-3)  # the mean is a lower bound


few = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(few, few, st.booleans())
def test_the_exchange_taken_is_the_best_of_all(one, other, equal_counts):
    heavy, light = sorted((one, other), key=sum, reverse=True)
    gap = sum(heavy) - sum(light)
    values, at = np.array([*heavy, *light], float), np.arange(len(heavy) + len(light))
    mine, theirs = at[: len(heavy)], at[len(heavy) :]
    offered = [*light] + [0] * (not equal_counts)
    left = [abs(gap - 2 * (h - p)) for h in heavy for p in offered if 0 < h - p < gap]
    found = _best_pair(values, mine, theirs, float(gap), 0.0, equal_counts)
    if found is None:
        assert not left
    else:
        assert abs(values[found[0]].sum() - values[found[1]].sum()) == min(left)
        assert sorted([*found[0], *found[1]]) == at.tolist()
        assert not equal_counts or len(found[0]) == len(heavy)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=14), st.integers(2, 5), st.booleans())
def test_no_single_exchange_with_the_heaviest_rank_is_left(costs, ranks, equal_counts):
    """Tried one by one: an item for another, or for nothing, that brings the heaviest and a lighter rank nearer."""
    assert ranks <= _PARTNERS
    parts = balance(costs, ranks, equal_counts)
    sums = [sum(costs[i] for i in part) for part in parts]
    heavy = int(np.argmax(sums))
    for light in set(range(ranks)) - {heavy}:
        offered = [costs[i] for i in parts[light]] + [0] * (not equal_counts)
        moves = {costs[i] - price for i in parts[heavy] for price in offered}
        assert not [m for m in moves if 0 < m < sums[heavy] - sums[light]], (parts, heavy, light)


def test_fewer_items_than_ranks_leave_the_last_ranks_empty():
    assert balance([3.0, 2.0], 4) == [[0], [1], [], []]
    assert balance([0.0, 0.0], 2, equal_counts=True) == [[0], [1]]
    assert balance([], 2) == [[], []]


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [-1.0], [[1.0, 2.0]]])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ArgumentError, match="finite and not negative"):
        balance(costs, 2)
    with pytest.raises(ArgumentError, match="ranks is 0"):
        balance([1.0], 0)


def joined(costs, ranks):
    """Sums of each rank by the differencing method as verl writes it: sets, a heap, one join after the other."""
    order = sorted(costs, reverse=True)
    heap = []
    for n in range(0, len(order), ranks):
        sums = order[n : n + ranks]
        heap.append((sums[-1] - sums[0], -sums[0], n, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[3], heapq.heappop(heap)[3]
        sums = sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True)
        heapq.heappush(heap, (sums[-1] - sums[0], -sums[0], len(order) + len(heap), sums))
    return heap[0][3]


@pytest.mark.parametrize(("count", "ranks"), [(8, 1), (8, 8), (64, 2), (96, 8), (640, 32)])
def test_sums_are_those_of_the_method(count, ranks):
    costs = np.random.default_rng(count).permutation(2**20)[:count].astype(float)
    found = differenced(costs, ranks)
    assert found.shape == (ranks, count // ranks)
    assert sorted(found.ravel()) == list(range(count))
    assert sorted(costs[found].sum(axis=1)) == sorted(joined(costs.tolist(), ranks))


@pytest.mark.parametrize(("count", "ranks"), [(1024, 32), (1000, 32), (2048, 128)])
def test_exchanges_lower_the_largest_sum(count, ranks):
    drawn = np.random.default_rng(0).lognormal(6.5, 0.8, count).round()
    costs = 24_576 * drawn + drawn**2
    parts, done = equal_parts(costs, ranks)
    filled = np.append(costs, np.zeros(-count % ranks))
    before = filled[differenced(filled, ranks)].sum(axis=1).max()
    largest = max(costs[part].sum() for part in parts)
    assert done and largest < before
    assert largest <= 1.002 * costs.sum() / ranks
