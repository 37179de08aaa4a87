"""Groups that no bin takes whole: the pieces of least price, against every partition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.groups import answered

import mmpack as mp
from mmpack.layout.forest import build_forest
from mmpack.planning.cost import CostModel
from mmpack.planning.cut import Parts, cheapest


def partitions(items):
    """Every way to put items into pieces."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for k in range(len(smaller)):
            yield [*smaller[:k], [first, *smaller[k]], *smaller[k + 1 :]]


@st.composite
def trees(draw, most=6):
    """Paths of a group: tuples of text runs, the same run being the same tokens."""
    paths = [()]
    for k in range(draw(st.integers(2, most))):
        parent = draw(st.sampled_from(paths))
        paths.append((*parent, (k, draw(st.integers(1, 9)))))
    return [p for p in paths if p] + [paths[-1]] * draw(st.integers(0, 1))


def samples_of(paths):
    return [
        answered(f"s{n}", "g", [x for run, length in path for x in [1000 * run + 5] * length], [n])
        for n, path in enumerate(paths)
    ]


def rows_of(samples):
    return build_forest(samples).num_tokens


@settings(max_examples=40, deadline=None)
@given(trees(), st.integers(0, 12))
def test_no_partition_repeats_fewer_rows(paths, room):
    samples = samples_of(paths)
    budget = max(map(len, samples)) + room
    made = mp.plan(samples, max_tokens=budget, share_prefix=True, cost=CostModel(row=1.0))
    found = sum(made.bin_rows)
    fitting = [
        sum(rows)
        for pieces in partitions(list(range(len(samples))))
        if max(rows := [rows_of([samples[i] for i in p]) for p in pieces]) <= budget
    ]
    # bins may hold several pieces of a group, which are then one again
    assert found == min(fitting)


@st.composite
def parted(draw, least=2, most=7):
    count = draw(st.integers(least, most))
    parts = draw(st.integers(1, 8))
    has = draw(
        st.lists(
            st.lists(st.booleans(), min_size=parts, max_size=parts), min_size=count, max_size=count
        )
    )
    has = np.concatenate([np.array(has), np.eye(count, dtype=bool)], axis=1)
    sizes = draw(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 9)),
            min_size=parts + count,
            max_size=parts + count,
        )
    )
    has, sizes = has[:, has.any(axis=0)], np.array(sizes)[has.any(axis=0)]
    taken = sizes.reshape(-1, 2)
    prices = np.array(
        draw(st.lists(st.integers(0, 20), min_size=len(taken), max_size=len(taken))), float
    )
    room = np.array(draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
    return Parts(has, taken, (has @ taken).max(axis=0) + room, prices)


@settings(max_examples=60, deadline=None)
@given(parted())
def test_exact_pieces_are_the_cheapest_of_all_partitions(parts):
    count = len(parts.has)
    singles = [[i] for i in range(count)]
    found = cheapest(parts, singles, range(count))
    assert sorted(i for p in found for i in p) == list(range(count))
    assert all(map(parts.fits, found))
    every = [p for p in partitions(list(range(count))) if all(map(parts.fits, p))]
    assert parts.cost(found) == pytest.approx(min(map(parts.cost, every)))
    assert parts.least() <= parts.cost(found) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(parted(least=9, most=14))
def test_pieces_of_many_items_are_no_dearer_than_those_found(parts):
    singles = [[i] for i in range(len(parts.has))]
    found = cheapest(parts, singles, range(len(parts.has)))
    assert sorted(i for p in found for i in p) == list(range(len(parts.has)))
    assert all(map(parts.fits, found))
    assert parts.least() * (1 - 1e-9) <= parts.cost(found) <= parts.cost(singles)


def test_a_picture_is_not_encoded_twice_to_save_a_few_rows():
    """Two samples see a large picture, the others share some more text; a bin takes two."""
    seen, text = [5, 6], [5, 6, 7, 8]
    samples = [
        answered(
            f"s{k}",
            "g",
            seen if k in (0, 2) else text,
            [100 + k] * 4,
            (1, 8, 8) if k in (0, 2) else None,
        )
        for k in range(4)
    ]
    most = max(rows_of(samples[::2]), rows_of(samples[1::2]))
    made = mp.plan(samples, max_tokens=most, share_prefix=True)
    assert made.bins == [[0, 2], [1, 3]] and made.stats["patches_repeated"] == 0
