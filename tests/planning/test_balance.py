"""balance against the exact optimum by enumeration, longest-processing-time-first, and known bounds."""

import heapq
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.planning.balance import _PARTNERS, _best_pair, _largest_differencing, balance


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


def differenced(costs, ranks):
    """Sums of Karmarkar and Karp's method, by lists: the two partitions of largest spread are joined crosswise."""
    parts = [[0.0] * (ranks - 1) + [cost] for cost in costs]
    while len(parts) > 1:
        parts.sort(key=lambda sums: sums[-1] - sums[0])
        first, second = parts.pop(), parts.pop()
        parts.append(sorted(a + b for a, b in zip(first, reversed(second), strict=True)))
    return parts[0]


distinct = st.lists(
    st.integers(1, 2**20), min_size=1, max_size=12, unique_by=lambda n: n.bit_length()
)


@given(distinct, st.integers(1, 5))
def test_differencing_is_karmarkar_and_karp_s(costs, ranks):
    """No two costs of one order of size: which partitions are joined is then never a tie."""
    values = np.array(costs, float)
    parts = _largest_differencing(values.tolist(), ranks)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(costs)))
    assert sorted(values[part].sum() for part in parts) == pytest.approx(differenced(costs, ranks))


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
