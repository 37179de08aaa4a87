"""Histograms of any numbers, and forests of any shape: every value and every row is drawn once."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.view.bars import HIGH, WIDTH, histogram, saved_parts
from mmpack.view.forest import TALLEST, forest_drawing, pieces
from mmpack.view.pages import svg
from mmpack.view.parts import MOST, WIDE, Box, Stroke

FLOATS = st.floats(width=64)
WHOLE = st.integers(-(2**40), 2**40)


def counts(figure):
    return [int(re.match(r"\d+", s.about)[0]) for s in figure.drawing.shapes if isinstance(s, Box)]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.lists(FLOATS, max_size=30), st.lists(WHOLE, max_size=30)))
def test_every_finite_value_is_in_one_bar(values):
    figure = histogram(values, "numbers")
    finite = np.isfinite(np.asarray(values, np.float64)).sum()
    assert sum(counts(figure)) == finite
    assert ("not finite" in figure.caption) == (finite < len(values))
    for box in (s for s in figure.drawing.shapes if isinstance(s, Box)):
        assert box.x >= 0 and box.x + box.width <= WIDTH + 1e-9
        assert box.y >= 0 and box.y + box.height == pytest.approx(HIGH)
    assert "nan" not in str(svg(figure.drawing)).lower()


@pytest.mark.parametrize(
    "values",
    [
        [2**70, 1, 2],
        [2**70],
        [10**27, 10**27 + 1],
        [2**62, 2**62 + 1],
        [2**63 - 1, 0],
        [2**53, 2**53 + 2],
    ],
)
def test_huge_integers_are_drawn(values):
    assert sum(counts(histogram(values, "numbers"))) == len(values)


def test_the_bars_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=500)
    figure = histogram(values, "normal")
    assert counts(figure) == np.histogram(values, bins=16)[0].tolist()
    assert f"median {np.median(values):.4g}" in figure.caption
    assert histogram([7] * 5, "sevens").caption == "5 values, all 7"
    assert saved_parts([("rows", 0, 0), ("media", 8, 2)], "here")[2].rows == [
        ("rows", "0", "0", "–"),
        ("media", "8", "2", "75.0%"),
    ]


@st.composite
def forests(draw):
    """Lengths and parents, a parent before its children; kinds and loss of the rows."""
    count = draw(st.integers(1, 30))
    parents = [draw(st.integers(-1, g - 1)) for g in range(count)]
    offsets = np.cumsum([0, *(draw(st.integers(0, 9)) for _ in range(count))])
    rows = st.lists(st.integers(0, 2), min_size=int(offsets[-1]), max_size=int(offsets[-1]))
    return offsets.tolist(), parents, np.array(draw(rows), np.int8), np.array(draw(rows)) > 1


@settings(max_examples=60, deadline=None)
@given(forests())
def test_every_row_is_drawn_once_in_its_kind_and_below_its_parent(forest):
    offsets, parents, kind, loss = forest
    drawing, left_out = forest_drawing(offsets, parents, {0: ["s"]}, kind, loss, "abc")
    assert left_out == 0 and drawing.height <= TALLEST + 30
    scale, (seen, read) = WIDE / max(offsets[-1], 1), np.zeros((2, len(kind)), int)
    tops, strokes = {}, [s for s in drawing.shapes if isinstance(s, Stroke)]
    for box in (s for s in drawing.shapes if isinstance(s, Box)):
        if box.style == "mm-hit":
            g = int(re.match(r"segment (\d+):", box.about)[1])
            tops[g] = box.y
            continue
        start, stop = round(box.x / scale), round((box.x + box.width) / scale)
        if box.style == "mm-read":
            read[start:stop] += 1
        else:
            assert (kind[start:stop] == "abc".index(box.style)).all()
            seen[start:stop] += 1
    assert (seen == 1).all() and (read == loss).all()
    assert sorted(tops) == list(range(len(parents)))
    assert all(tops[g] > tops[p] for g, p in enumerate(parents) if p >= 0)
    assert len(strokes) == 2 * sum(p >= 0 for p in parents)


def test_what_is_too_much_is_counted():
    many = 3 * MOST
    kind = np.zeros(many, np.int8)
    offsets, parents = list(range(many + 1)), [-1] * many
    drawing, left_out = forest_drawing(offsets, parents, {}, kind, kind > 0, "a")
    assert len(drawing.shapes) <= MOST + 4
    drawn = sum(s.style == "mm-hit" for s in drawing.shapes)
    assert left_out == many - drawn


def test_pieces_are_where_all_columns_are_constant():
    a, b = np.array([0, 0, 1, 1, 1, 0]), np.array([1, 0, 0, 0, 1, 1])
    assert list(pieces(a, b)) == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    assert list(pieces(a[:0], b[:0])) == []


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e300, 1e300), st.integers(1, 60))
def test_numbers_a_few_roundings_apart_are_drawn(start, steps):
    stop = start
    for _ in range(steps):
        stop = float(np.nextafter(stop, np.inf))
    assert sum(counts(histogram([start, stop], "numbers"))) == 2
