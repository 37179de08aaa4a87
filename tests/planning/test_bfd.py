"""best_fit_decreasing against a textbook scan, the exact optimum (scipy's MILP, brute force) and lower bounds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import PlanError
from mmpack.planning.bfd import best_fit_decreasing, spread


def textbook(sizes, capacity):
    """Best-fit-decreasing, one item at a time, every bin looked at: the loads."""
    loads = []
    for size in sorted(sizes, reverse=True):
        open_bins = [b for b, load in enumerate(loads) if load + size <= capacity]
        if open_bins:
            loads[max(open_bins, key=lambda b: loads[b])] += size
        else:
            loads.append(size)
    return loads


def used(sizes, parts, items):
    """What the items of a bin take: [D]."""
    total = np.sum([sizes[i] for i in items], axis=0)
    for key, times in Counter(k for i in items for k in parts[i]).items():
        dimension, size = key[1], key[2]
        total[dimension] -= (times - 1) * size
    return total


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(40, 90))
def test_one_dimension_fills_bins_as_the_textbook_does(sizes, capacity):
    bins = best_fit_decreasing(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert sorted(sum(sizes[i] for i in b) for b in bins) == sorted(textbook(sizes, capacity))


def test_fifty_thousand_sequences_fill_the_bins():
    sizes = np.random.default_rng(0).integers(16, 4096, 50_000)
    bins = best_fit_decreasing(sizes, 8192)
    filled = np.array([sizes[b].sum() for b in bins])
    assert filled.max() <= 8192 and sorted(i for b in bins for i in b) == list(range(50_000))
    assert filled.sum() / (8192 * len(bins)) >= 0.9997


def test_sizes_of_no_item_and_no_size():
    assert best_fit_decreasing([], 10) == []
    assert best_fit_decreasing([0, 0], 10) == [[0, 1]]
    assert best_fit_decreasing(np.zeros((0, 2)), (10, 5)) == []


def test_an_item_over_a_capacity_is_named():
    with pytest.raises(PlanError, match=r"sizes\[1\] is 11, but the capacity is 10"):
        best_fit_decreasing([3, 11], 10)
    with pytest.raises(PlanError, match=r"sizes\[0\] is \[3, 9\]"):
        best_fit_decreasing(np.array([[3, 9]]), (10, 8))


def textbook_of_several(sizes, capacity):
    """The same of several dimensions: largest share first, into the bin that fits and has the least free."""
    bins = []
    for i in sorted(range(len(sizes)), key=lambda i: (-max(sizes[i] / capacity), i)):
        fitting = [b for b in bins if (b[1] >= sizes[i]).all()]
        if not fitting:
            bins.append(([], np.array(capacity)))
            fitting = bins[-1:]
        best = min(fitting, key=lambda b: sum((b[1] / capacity).tolist()))
        best[0].append(i)
        best[1][:] -= sizes[i]
    return [items for items, _ in bins]


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=40), st.integers(0, 2**32 - 1))
def test_several_dimensions_fill_bins_as_the_textbook_does(sizes, seed):
    random = np.random.default_rng(seed)
    more = random.integers(0, 4, (int(random.integers(0, 80)), 3))
    sizes = np.concatenate([np.array(sizes, dtype=np.int64).reshape(-1, 3), more])
    capacity = np.array([11, 8, 6])
    assert best_fit_decreasing(sizes, capacity) == textbook_of_several(sizes, capacity)


@st.composite
def items_with_parts(draw, max_size=12):
    """Sizes [n, 2] below (20, 12), and parts of the second dimension that items share."""
    n = draw(st.integers(1, max_size))
    media = {f"m{k}": draw(st.integers(1, 5)) for k in range(3)}
    sizes, parts = [], []
    for _ in range(n):
        names = sorted(draw(st.sets(st.sampled_from(sorted(media)), max_size=2)))
        parts.append([(name, 1, media[name]) for name in names])
        sizes.append((draw(st.integers(0, 20)), sum(media[name] for name in names)))
    return np.array(sizes), parts


@given(items_with_parts())
def test_two_dimensions_stay_within_budgets(case):
    sizes, parts = case
    bins = best_fit_decreasing(sizes, (20, 12), parts)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert all((used(sizes, parts, b) <= (20, 12)).all() for b in bins)


def test_a_shared_part_draws_items_into_one_bin():
    sizes = np.array([[6, 4], [6, 4], [6, 4], [6, 4]])
    parts = [[("a", 1, 4)], [("b", 1, 4)], [("a", 1, 4)], [("b", 1, 4)]]
    assert best_fit_decreasing(sizes, (12, 4), parts) == [[0, 2], [1, 3]]
    assert len(best_fit_decreasing(sizes, (12, 4))) == 4


def test_spread_evens_loads_within_the_capacity():
    sizes = np.array([[4], [4], [4], [4], [2], [2]])
    loads = sizes[:, 0].astype(float)
    bins = spread(sizes, (12,), loads, 2)
    assert sorted(sum(loads[b]) for b in bins) == [10, 10]
    assert spread(sizes, (6,), loads, 3) is None  # 20 into 18
