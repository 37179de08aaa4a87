"""Equal counts on a matrix: parts of like size, sums beside verl's rule of differencing, written out item by item."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.planning.equal_counts import PAIRED, differenced, equal_parts


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


@given(st.lists(st.integers(0, 50) | st.floats(0, 1e9), min_size=1, max_size=60), st.integers(1, 9))
def test_counts_differ_by_one_at_most(costs, ranks):
    parts, _ = equal_parts(np.array(costs, float), ranks)
    counts = [len(part) for part in parts]
    assert len(parts) == ranks and max(counts) - min(counts) <= 1
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))


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


def test_many_items_per_rank_are_left_to_single_pairs():
    parts, done = equal_parts(np.random.default_rng(0).random(2 * (PAIRED + 1)), 2)
    assert not done and [len(part) for part in parts] == [PAIRED + 1] * 2
