"""balance against the exact optimum by enumeration, longest-processing-time-first, and known bounds."""

import heapq
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.planning.balance import balance


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
    st.lists(st.integers(0, 50) | st.floats(0, 1e9), max_size=40),
    st.integers(1, 9),
    st.booleans(),
)
def test_every_item_is_on_one_rank(costs, ranks, equal_counts):
    parts = balance(costs, ranks, equal_counts)
    assert len(parts) == ranks and all(p == sorted(p) for p in parts)
    assert sorted(i for p in parts for i in p) == list(range(len(costs)))
    counts = [len(p) for p in parts]
    assert not equal_counts or max(counts) - min(counts) <= 1
    assert balance(np.array(costs), ranks, equal_counts) == parts


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("n", "ranks"), [(10, 2), (8, 3), (6, 4)])
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
@pytest.mark.parametrize(("n", "ranks"), [(1024, 32), (4096, 256)])
@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
def test_large_cases_are_even(n, ranks, equal_counts, kind):
    random = np.random.default_rng(0)
    lengths = {
        "uniform": random.integers(100, 8192, n),
        "lognormal": np.clip(random.lognormal(7, 1, n), 16, 16_384).astype(np.int64),
    }[kind]
    largest = max(lengths[p].sum() for p in balance(lengths, ranks, equal_counts))
    assert largest <= longest_first(lengths, ranks)
    assert largest <= lengths.sum() / ranks * (1 + 1e-3)  # the mean is a lower bound


def test_thirty_items_on_two_ranks_leave_almost_no_gap():
    random = np.random.default_rng(0)
    gaps = []
    for _ in range(20):
        costs = random.integers(100, 8192, 30)
        sums = [costs[p].sum() for p in balance(costs, 2)]
        gaps.append(abs(sums[0] - sums[1]))
    assert np.mean(gaps) <= 4  # about 1; joined in another order, about 16


def test_one_item_that_outweighs_all_others_is_alone():
    assert balance([1, 1, 100, 1], 2) == [[0, 1, 3], [2]]
    assert [len(p) for p in balance([1, 1, 100, 1], 2, equal_counts=True)] == [2, 2]


def test_fewer_items_than_ranks_leave_the_last_ranks_empty():
    assert balance([3.0, 2.0], 4) == [[0], [1], [], []]
    assert balance([0.0, 0.0], 2, equal_counts=True) == [[0], [1]]
    assert balance([], 2) == [[], []]


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [float("inf")], [-1.0], [[1.0, 2.0]]])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ArgumentError, match="finite and not negative"):
        balance(costs, 2)


def test_no_rank_is_refused():
    with pytest.raises(ArgumentError, match="ranks is 0"):
        balance([1.0], 0)
