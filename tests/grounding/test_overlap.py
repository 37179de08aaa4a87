"""Against torchvision.ops in its environment, rational numbers everywhere, and scipy for matching."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpack as mp
from mmpack.grounding.overlap import giou, iou, match, point_in_box

side = st.integers(-50, 50)
box = st.tuples(side, side, st.integers(0, 40), st.integers(0, 40)).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)
boxes = st.lists(box, max_size=5)


def exact(a, b):
    """IoU and GIoU by rational numbers, after the definition."""

    def area(x0, y0, x1, y1):
        return max(x1 - x0, 0) * max(y1 - y0, 0)

    shared = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    union = area(*a) + area(*b) - shared
    hull = area(min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))
    ratio = Fraction(shared, union) if union else Fraction(0)
    return ratio, ratio - (Fraction(hull - union, hull) if hull else 1)


@settings(max_examples=80, deadline=None)
@given(boxes, boxes, st.sampled_from([1.0, 1e-150, 1e200, 2.0**-1000]))
def test_against_rational_numbers(a, b, scale):
    one, two = (np.array(x, float).reshape(-1, 4) * scale for x in (a, b))
    found = iou(one, two), giou(one, two)
    assert found[0].shape == found[1].shape == (len(a), len(b))
    for i, j in itertools.product(range(len(a)), range(len(b))):
        for value, true in zip((found[0][i, j], found[1][i, j]), exact(a[i], b[j]), strict=True):
            assert abs(value - true) < 1e-12


def test_boxes_without_area_overlap_nothing():
    point = [[1, 1, 1, 1]]
    assert iou(point, point).tolist() == [[0.0]]
    assert giou(point, point).tolist() == [[-1.0]]
    assert iou(point, [[0, 0, 2, 2]]).tolist() == [[0.0]]
    assert giou(point, [[0, 0, 2, 2]]).tolist() == [[0.0]]  # within: the hull is the union
    assert iou([], [[0, 0, 1, 1]]).shape == (0, 1)
    line = [[0, 0, 0, 4]]
    assert giou(line, [[2, 0, 2, 4]]).tolist() == [[-1.0]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(side, side), min_size=1, max_size=5), boxes)
def test_points_in_boxes(points, b):
    found = point_in_box(points, np.array(b).reshape(-1, 4))
    assert found.shape == (len(points), len(b))
    for (x, y), row in zip(points, found, strict=True):
        assert row.tolist() == [float(x0 <= x <= x1 and y0 <= y <= y1) for x0, y0, x1, y1 in b]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_matching_against_scipy(seed, shape):
    """The most allowed pairs, then the largest sum."""
    from scipy import optimize

    rng = np.random.default_rng(seed)
    array, allowed = rng.integers(-9, 9, shape), rng.random(shape) < rng.choice([0.3, 0.7, 1.0])
    rows, columns = optimize.linear_sum_assignment(
        np.where(allowed, array + 1000, 0), maximize=True
    )
    wanted = [p for p in zip(rows.tolist(), columns.tolist(), strict=True) if allowed[p]]
    pairs = match(array, allowed)
    assert pairs == sorted(pairs) and all(allowed[p] for p in pairs)
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs) == len(wanted)
    assert sum(int(array[p]) for p in pairs) == sum(int(array[p]) for p in wanted)


NAN, GOOD = float("nan"), [[0, 0, 1, 1]]


@pytest.mark.parametrize(
    "wrong",
    [
        *([[0, 0, NAN, 1]], [[0, 0, float("inf"), 1]], [0, 0, 1, 1], [[0, 0, 1]], "box"),
        *([[0, 0, 1, 1], [0]], [[1, 0, 0, 1]], [[True, False, True, True]]),
    ],
)
def test_wrong_arguments(wrong):
    for pair in ((wrong, GOOD), (GOOD, wrong)):
        with pytest.raises(mp.ArgumentError, match=r"iou: (boxes|others).* Fix: "):
            iou(*pair)
