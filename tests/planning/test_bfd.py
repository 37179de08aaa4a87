"""best_fit_decreasing against a textbook scan, the exact optimum (scipy's MILP, brute force) and lower bounds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

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


def fewest_bins(sizes, capacity):
    """The optimum of one-dimensional bin packing, by integer programming."""
    n = len(sizes)
    cost = np.concatenate([np.ones(n), np.zeros(n * n)])  # y[b], x[item, b]
    once = np.zeros((n, n + n * n))
    fits = np.zeros((n, n + n * n))
    for i in range(n):
        once[i, n + i * n : n + (i + 1) * n] = 1
        fits[i, i] = -capacity
        fits[i, n + i : n + n * n : n] = sizes
    rules = [LinearConstraint(once, 1, 1), LinearConstraint(fits, -np.inf, 0)]
    result = milp(cost, constraints=rules, integrality=np.ones_like(cost), bounds=Bounds(0, 1))
    return round(result.fun)


def used(sizes, parts, items):
    """What the items of a bin take: [D]."""
    total = np.sum([sizes[i] for i in items], axis=0)
    for key, times in Counter(k for i in items for k in parts[i]).items():
        dimension, size = key[1], key[2]
        total[dimension] -= (times - 1) * size
    return total


def partitions(items):
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for b in range(len(rest)):
            yield [*rest[:b], [items[0], *rest[b]], *rest[b + 1 :]]


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(40, 90))
def test_one_dimension_fills_bins_as_the_textbook_does(sizes, capacity):
    bins = best_fit_decreasing(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert sorted(sum(sizes[i] for i in b) for b in bins) == sorted(textbook(sizes, capacity))


@pytest.mark.parametrize("seed", range(12))
def test_one_dimension_is_near_the_optimum(seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(5, 70, 9).tolist()
    best = fewest_bins(sizes, 100)
    bins = len(best_fit_decreasing(sizes, 100))
    assert best <= bins <= int(11 / 9 * best + 6 / 9)  # Dósa 2007, a theorem


@pytest.mark.parametrize("high", [2048, 4096])
def test_fifty_thousand_sequences_fill_the_bins(high):
    sizes = np.random.default_rng(0).integers(16, high, 50_000)
    bins = best_fit_decreasing(sizes, 8192)
    filled = np.array([sizes[b].sum() for b in bins])
    assert filled.max() <= 8192 and sorted(i for b in bins for i in b) == list(range(50_000))
    assert filled.sum() / (8192 * len(bins)) >= 0.9997


def test_items_of_one_size_keep_their_order():
    assert best_fit_decreasing([5, 5, 5, 5, 5], 10) == [[0, 1], [2, 3], [4]]
    assert best_fit_decreasing([3, 6, 3, 4, 0], 10) == [[1, 3, 4], [0, 2]]


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


def test_bins_that_take_nothing_more_are_left_out_of_the_search():
    random = np.random.default_rng(1)
    sizes = np.stack([random.integers(1, 200, 2000), random.integers(0, 90, 2000)], axis=1)
    capacity = np.array([256, 100])
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


def test_two_dimensions_are_near_the_optimum():
    random = np.random.default_rng(3)
    ours = best = 0
    for _ in range(25):
        names = [sorted(random.choice(4, random.integers(0, 3), replace=False)) for _ in range(7)]
        parts = [[(int(k), 1, int(k) + 2) for k in some] for some in names]
        patches = [sum(p[2] for p in some) for some in parts]
        sizes = np.column_stack([random.integers(2, 15, 7), patches])
        feasible = [
            len(p)
            for p in partitions(list(range(7)))
            if all((used(sizes, parts, b) <= (20, 9)).all() for b in p)
        ]
        found = len(best_fit_decreasing(sizes, (20, 9), parts))
        assert min(feasible) <= found <= min(feasible) + 1
        ours, best = ours + found, best + min(feasible)
    assert ours <= 1.06 * best


def test_a_shared_part_draws_items_into_one_bin():
    sizes = np.array([[6, 4], [6, 4], [6, 4], [6, 4]])
    parts = [[("a", 1, 4)], [("b", 1, 4)], [("a", 1, 4)], [("b", 1, 4)]]
    assert best_fit_decreasing(sizes, (12, 4), parts) == [[0, 2], [1, 3]]
    assert len(best_fit_decreasing(sizes, (12, 4))) == 4


def test_a_bin_that_has_the_part_comes_before_a_fuller_one():
    sizes = np.array([[7, 4], [6, 4], [4, 4]])
    parts = [[("a", 1, 4)], [("b", 1, 4)], [("b", 1, 4)]]
    assert best_fit_decreasing(sizes, (12, 20), parts) == [[0], [1, 2]]
    assert best_fit_decreasing(sizes, (12, 20)) == [[0, 2], [1]]


def test_spread_evens_loads_within_the_capacity():
    sizes = np.array([[4], [4], [4], [4], [2], [2]])
    loads = sizes[:, 0].astype(float)
    bins = spread(sizes, (12,), loads, 2)
    assert sorted(sum(loads[b]) for b in bins) == [10, 10]
    assert spread(sizes, (6,), loads, 3) is None  # 20 into 18
