"""The digest by properties: what it must see, what it must not mind, and what it costs. The oracle is float64."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_sample

from mmpack.probe import Contract, Rows, run
from mmpack.probe.digest import DIRECTIONS, FLOOR, digest, distance, growth
from mmpack.probe.places import places_of
from mmpack.probe.record import Recorder

SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = 2.0**-21  # of digests, which are float32: of k projections, each a few times the norm
LEAST, MOST = 0.1, 3.0  # of what a difference is, that a digest of 8 directions makes of it


def rows_of(seed, rows, width):
    return np.random.default_rng(seed).standard_normal((rows, width))


def estimate(x, y):
    return distance(digest(torch.as_tensor(x)), digest(torch.as_tensor(y)))


@given(SEEDS, st.integers(1, 6), st.integers(1, 300), st.floats(-5, 1), st.data())
def test_a_change_of_one_element_is_seen_in_its_row_only(seed, rows, width, size, data):
    x = rows_of(seed, rows, width)
    row, element = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
    y = x.copy()
    y[row, element] += 10.0**size * np.linalg.norm(x[row])
    true = np.linalg.norm(x[row] - y[row]) / max(np.linalg.norm(x[row]), np.linalg.norm(y[row]))
    found = estimate(x, y)
    assert LEAST * true - ROUNDING <= found[row] <= MOST * true + ROUNDING
    assert not np.delete(found, row).any()


def test_distance_estimates_the_relative_distance():
    """Also of two elements exchanged; what is lost lies below the digests' rounding."""
    x = rows_of(0, 4000, 96)
    norm = np.linalg.norm(x, axis=1)
    for size in (1e-6, 1e-3, 0.3):
        y = x + size * rows_of(1, 4000, 96)
        true = np.linalg.norm(x - y, axis=1) / np.maximum(norm, np.linalg.norm(y, axis=1))
        share = estimate(x, y) / true
        # of chi with 8 degrees of freedom: mean square 1, and the quantiles that the docstring states
        assert np.square(share).mean() == pytest.approx(1, abs=0.05)
        assert 0.01 < np.mean((share < 0.45) | (share > 1.6)) < 0.03
        assert share.min() > 0.1
    y = x.copy()
    y[:, [3, 4]] = y[:, [4, 3]]
    assert (estimate(x, y) > 0.1 * np.linalg.norm(x - y, axis=1) / norm).all()
    assert (estimate(x, x * (1 + 1e-9)) < FLOOR).all()
    assert (estimate(x, x * (1 + 1e-6)) > FLOOR).all()


@given(SEEDS, st.integers(1, 40), st.integers(1, 64), st.integers(-20, 20))
def test_a_power_of_two_changes_no_error(seed, rows, width, power):
    """Units of a module don't matter."""
    x, y = rows_of(seed, rows, width), rows_of(seed ^ 1, rows, width)
    assert np.array_equal(estimate(x, y), estimate(x * 2.0**power, y * 2.0**power))


@given(SEEDS, st.integers(1, 40), st.integers(1, 64))
def test_a_row_has_its_digest_wherever_it_lies(seed, rows, width):
    """Layouts put rows at other places, among other rows."""
    x = torch.as_tensor(rows_of(seed, rows, width))
    order = torch.as_tensor(np.random.default_rng(seed).permutation(rows))
    assert distance(digest(x)[order.numpy()], digest(x[order])).max() <= ROUNDING
    alone = np.concatenate([digest(row[None]) for row in x])
    assert distance(digest(x), alone).max() <= ROUNDING


@given(SEEDS, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_a_dtype_is_no_difference(seed, dtype):
    x = torch.as_tensor(rows_of(seed, 5, 33)).to(dtype)
    assert np.array_equal(digest(x), digest(x.double()))


@given(SEEDS, st.sampled_from([np.nan, np.inf, -np.inf]), st.booleans())
def test_a_value_that_is_not_finite_equals_none_that_is(seed, value, in_both):
    x = rows_of(seed, 3, 16)
    broken = x.copy()
    broken[1, seed % 16] = value
    found = estimate(broken, broken if in_both else x)
    assert found[0] == found[2] == 0
    assert np.isnan(found[1]) if in_both else np.isposinf(found[1])


@given(st.integers(1, 50))
def test_rows_of_zeros_and_growth(width):
    zeros, ones = np.zeros((2, width)), np.ones((2, width))
    assert not estimate(zeros, zeros).any()
    assert (estimate(zeros, zeros + 1e-30) >= LEAST).all()
    sides = [digest(torch.as_tensor(x)) for x in (zeros, ones, 1.25 * ones)]
    assert growth(*sides[1:]) == pytest.approx(0.25, abs=1e-6)
    assert np.isnan(growth(*sides[:2])).all()


def recorded(values, places, order=None, memory=1 << 30):
    """A record of `values`, {module: [rows, width]}, by one pass and a noisy one that moves nothing."""
    recorder = Recorder("side", places, memory=memory)
    for again in (False, True):
        if again:
            recorder.again()
        for name, rows in values.items():
            take = np.arange(len(rows)) if order is None else order
            recorder.put(name, "out", rows[take], Rows("text", torch.arange(len(take)), take))
    return recorder


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 5), st.integers(2, 200), st.floats(-5.5, 0), st.data())
def test_a_change_beyond_the_bound_is_named_with_module_and_token(seed, modules, width, size, data):
    """Rows of one element more than the bound, at any module and token, by any order of rows."""
    places = places_of(
        [make_sample([("text", range(5)), ("response", range(4))], f"s{i}") for i in (0, 1)]
    )
    count = len(places.tokens)
    values = {f"m{i}": torch.as_tensor(rows_of([seed, i], count, width)) for i in range(modules)}
    other = {name: rows.clone() for name, rows in values.items()}
    module = data.draw(st.integers(0, modules - 1))
    row, element = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, width - 1))
    norm = values[f"m{module}"][row].norm()
    other[f"m{module}"][row, element] += 10.0**size / LEAST * norm
    order = np.random.default_rng(seed).permutation(count)
    contract = Contract(floor=0.5 * 10.0**size)
    own = recorded(values, places).record
    report = run(own, recorded(other, places, order).record, contract=contract)
    assert report.first is not None
    sample, token = places.tokens[row]
    assert report.first.module == f"m{module}"
    assert (report.first.sample, report.first.token) == (f"s{sample}", token)
    assert run(own, recorded(values, places, order).record, contract=contract).ok


def test_memory_is_bounded_for_a_long_pack():
    """100 modules of 4,000 tokens: what is held stays within the budget, whatever the width; values are the same."""
    tokens, modules, budget = 4_000, 100, 1 << 19
    long = make_sample([("text", np.arange(tokens - 1) % 1000), ("response", [1])])
    places = places_of([long])
    rows = torch.randn(tokens, 64)
    entry = tokens * (DIRECTIONS + 2) * 4
    assert modules * entry > 20 * budget  # else the budget would not matter
    values = dict.fromkeys((f"m{i}" for i in range(modules)), rows)
    small = {name: values[name] for name in list(values)[:2]}
    recorded(small, places)  # directions are made, and stay
    tracemalloc.start()
    recorder = recorded(values, places, memory=budget)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= budget + 2_000 * modules  # and the objects themselves
    assert peak <= budget + 12 * entry  # and what one module's digests take on their way
    assert recorder.store.held <= budget < recorder.store.spilled
    whole = recorded(small, places)
    for name in small:
        one, other = (r.record.entries[f"{name}<out"].values for r in (recorder, whole))
        assert np.array_equal(one, other)
    assert np.array_equal(recorder.record.entries["m99<out"].values, other)
