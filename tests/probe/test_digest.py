"""Digests against the vectors that they stand for: numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.probe.digest import FLOOR, digest, distance, growth


def relative(x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    norms = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
    return np.linalg.norm(x - y, axis=1) / np.maximum(*norms)


def digests(*arrays):
    return [digest(torch.from_numpy(a)) for a in arrays]


def test_distance_estimates_the_relative_distance():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 96))
    for size in (1e-6, 1e-3, 0.3):
        y = x + size * rng.standard_normal(x.shape)
        share = distance(*digests(x, y)) / relative(x, y)
        # of chi with 8 degrees of freedom: mean square 1, and the quantiles that the docstring states
        assert np.square(share).mean() == pytest.approx(1, abs=0.05)
        assert 0.01 < np.mean((share < 0.45) | (share > 1.6)) < 0.03
        assert share.min() > 0.1


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 300),
    at=st.integers(0, 299),
    size=st.floats(1e-4, 1e3),
    seed=st.integers(0, 2**20),
)
def test_one_changed_element_is_seen(width, at, size, seed):
    x = np.random.default_rng(seed).standard_normal((1, width)) + 0.1
    y = x.copy()
    y[0, at % width] += size
    [found] = distance(*digests(x, y))
    assert found > 0.1 * relative(x, y)[0]


def test_two_elements_exchanged_are_seen():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2000, 64))
    y = x.copy()
    y[:, [3, 4]] = y[:, [4, 3]]
    assert (distance(*digests(x, y)) > 0.1 * relative(x, y)).all()


def test_what_a_digest_misses_is_below_its_floor():
    x = np.random.default_rng(2).standard_normal((50, 64))
    assert (distance(*digests(x, x * (1 + 1e-9))) < FLOOR).all()
    assert (distance(*digests(x, x * (1 + 1e-6))) > FLOOR).all()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    whole = digest(x)
    parts = np.concatenate([digest(x[a : a + 7]) for a in range(0, 64, 7)])
    assert np.nanmax(distance(whole, parts)) < FLOOR


def test_rows_that_are_not_finite():
    x = np.ones((4, 8))
    y = x.copy()
    y[1, 2] = np.nan
    y[2, 2] = np.inf
    z = y.copy()
    assert np.isinf(distance(*digests(x, y))[[1, 2]]).all()
    assert np.isnan(distance(*digests(y, z))[[1, 2]]).all()
    assert distance(*digests(x, y))[0] == 0
    unseen = np.full((4, 10), np.nan, np.float32)
    assert np.isnan(distance(unseen, digests(x)[0])).all()


def test_rows_of_zeros_and_growth():
    zeros, ones = np.zeros((1, 8)), np.ones((1, 8))
    assert distance(*digests(zeros, zeros))[0] == 0
    assert distance(*digests(zeros, ones))[0] >= 1 - 1e-6
    assert growth(*digests(ones, 1.25 * ones))[0] == pytest.approx(0.25, abs=1e-6)
    assert np.isnan(growth(*digests(zeros, ones))[0])
