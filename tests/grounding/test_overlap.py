"""Against torchvision.ops in its environment, rational numbers everywhere, and scipy for matching."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpack as mp
from mmpack.grounding import centre_distance, giou, iou, match, point_in_box

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


@settings(max_examples=200, deadline=None)
@given(boxes, boxes, st.sampled_from([1.0, 1e-150, 1e200, 2.0**-1000]))
def test_against_rational_numbers(a, b, scale):
    one, two = (np.array(x, float).reshape(-1, 4) * scale for x in (a, b))
    found = iou(one, two), giou(one, two)
    assert found[0].shape == found[1].shape == (len(a), len(b))
    for i, j in itertools.product(range(len(a)), range(len(b))):
        for value, true in zip((found[0][i, j], found[1][i, j]), exact(a[i], b[j]), strict=True):
            assert abs(value - true) < 1e-12


@pytest.mark.upstream
def test_against_torchvision():
    import torch
    from torchvision import ops

    rng = np.random.default_rng(0)
    corner, size = rng.uniform(-500, 1000, (2, 200, 2)), rng.uniform(0.01, 600, (2, 200, 2))
    a, b = np.concatenate([corner, corner + size], -1)
    one, two = torch.from_numpy(a), torch.from_numpy(b)
    np.testing.assert_allclose(iou(a, b), ops.box_iou(one, two).numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        giou(a, b), ops.generalized_box_iou(one, two).numpy(), rtol=0, atol=1e-12
    )


def test_boxes_without_area_overlap_nothing():
    point = [[1, 1, 1, 1]]
    assert iou(point, point).tolist() == [[0.0]]
    assert giou(point, point).tolist() == [[-1.0]]
    assert iou(point, [[0, 0, 2, 2]]).tolist() == [[0.0]]
    assert giou(point, [[0, 0, 2, 2]]).tolist() == [[0.0]]  # within: the hull is the union
    line = [[0, 0, 0, 4]]
    assert giou(line, [[2, 0, 2, 4]]).tolist() == [[-1.0]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(side, side), max_size=5), boxes)
def test_points_in_boxes(points, b):
    found = point_in_box(points, b)
    assert found.shape == (len(points), len(b))
    for (x, y), row in zip(points, found, strict=True):
        assert row.tolist() == [float(x0 <= x <= x1 and y0 <= y <= y1) for x0, y0, x1, y1 in b]


@settings(max_examples=100, deadline=None)
@given(boxes, st.lists(st.tuples(side, side), max_size=5))
def test_distances_of_centres(b, points):
    found = centre_distance(b, points, 250.0)
    for box, row in zip(b, found, strict=True):
        centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        assert row.tolist() == pytest.approx(
            [math.dist(centre, p) / 250 for p in points], abs=1e-12
        )


def best(array, allowed):
    """The most pairs, then the largest sum, over all choices."""
    n, m = array.shape
    choices = [
        [(i, j) for i, j in zip(rows, columns, strict=True) if allowed[i, j]]
        for k in [min(n, m)]
        for rows in itertools.combinations(range(n), k)
        for columns in itertools.permutations(range(m), k)
    ]
    return max((len(c), sum(int(array[p]) for p in c)) for c in choices)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_matching_against_every_choice(n, m, data):
    cell = st.lists(st.integers(-9, 9), min_size=n * m, max_size=n * m)
    array = np.array(data.draw(cell)).reshape(n, m)
    bools = st.lists(st.booleans(), min_size=n * m, max_size=n * m)
    allowed = np.array(data.draw(bools), bool).reshape(n, m)
    pairs = match(array, allowed)
    assert pairs == sorted(pairs) and all(allowed[p] for p in pairs)
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    assert (len(pairs), sum(int(array[p]) for p in pairs)) == best(array, allowed)


def test_matching_against_scipy():
    from scipy import optimize

    rng = np.random.default_rng(0)
    for shape in [(30, 20), (20, 30), (25, 25), (1, 9), (9, 1)]:
        array = rng.normal(size=shape)
        rows, columns = optimize.linear_sum_assignment(array, maximize=True)
        assert match(array) == list(zip(rows.tolist(), columns.tolist(), strict=True))


def test_nothing_to_match():
    assert match(np.zeros((0, 3))) == match(np.zeros((3, 0))) == match([[]]) == []
    assert match([[1.0]], [[False]]) == []
    assert iou([], [[0, 0, 1, 1]]).shape == (0, 1) and giou([], []).shape == (0, 0)


NAN, GOOD = float("nan"), [[0, 0, 1, 1]]


@pytest.mark.parametrize(
    "call",
    [
        lambda: iou([[0, 0, NAN, 1]], GOOD),
        lambda: iou(GOOD, [[0, 0, float("inf"), 1]]),
        lambda: iou([0, 0, 1, 1], GOOD),
        lambda: iou([[0, 0, 1]], GOOD),
        lambda: iou(None, GOOD),
        lambda: iou("box", GOOD),
        lambda: iou([[0, 0, 1, 1], [0]], GOOD),
        lambda: giou([[1, 0, 0, 1]], GOOD),
        lambda: giou([[True, False, True, True]], GOOD),
        lambda: point_in_box(GOOD, GOOD),
        lambda: point_in_box([[NAN, 0]], GOOD),
        lambda: centre_distance(GOOD, GOOD, 0),
        lambda: centre_distance(GOOD, GOOD, NAN),
        lambda: centre_distance([[1, 2, 3]], GOOD, 1.0),
        lambda: centre_distance([[1, 1, 0, 0]], GOOD, 1.0),
        lambda: match([1, 2]),
        lambda: match([[NAN]]),
        lambda: match(None),
        lambda: match([["a"]]),
        lambda: match([[1.0]], [[1]]),
        lambda: match([[1.0]], [True]),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(mp.ArgumentError, match=r": .* Fix: "):
        call()


def test_a_pair_does_not_depend_on_the_other_boxes():
    assert iou([[0, 0, 1, 1], [0, 0, 1e200, 1e200]], GOOD).ravel().tolist() == [1.0, 0.0]
