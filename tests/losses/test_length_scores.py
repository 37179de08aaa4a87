"""Length penalties against TRL's own code, cosines of numpy, and properties of their papers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmpack as mp


def values(scores):
    assert all(len(of_sample) <= 1 for of_sample in scores)
    return [of_sample[0].value if of_sample else None for of_sample in scores]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 50), st.data())
def test_soft_overlong_against_trl(lengths, max_length, data):
    from trl.rewards import get_soft_overlong_punishment

    buffer = data.draw(st.integers(1, max_length))
    theirs = get_soft_overlong_punishment(max_length, buffer)([[0] * n for n in lengths])
    assert values(mp.losses.soft_overlong_scores(lengths, max_length, buffer)) == pytest.approx(
        theirs
    )
    doubled = values(mp.losses.soft_overlong_scores(lengths, max_length, buffer, penalty=2.0))
    assert doubled == pytest.approx([2 * x for x in theirs])


def test_cosine():
    lengths = list(range(1, 12))
    right = [n % 2 == 0 for n in lengths]
    got = values(mp.losses.cosine_length_scores(lengths, right, 10))
    cosine = (1 + np.cos(np.pi * np.array(lengths) / 10)) / 2
    want = np.where(right, 1 + cosine * (2 - 1), 0 + cosine * (-10 - 0))
    want[np.array(lengths) >= 10] = -10
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert got[1] > got[3] > 1  # right: the shorter the better
    assert got[0] < got[2] < 0  # wrong: the longer the better
    flat = mp.losses.cosine_length_scores([3], [True], 10, correct_from=0.5, correct_to=0.5)
    assert values(flat) == [0.5]


def test_linear():
    assert values(mp.losses.linear_length_scores([5, 10, 12], 10, alpha=0.5)) == [-2.5, 0.0, -1.0]
    assert math.copysign(1, values(mp.losses.linear_length_scores([10], 10))[0]) == 1


def test_within_a_group():
    lengths, groups = [10, 20, 30, 7, 7, 40], [3, 3, 3, -1, -1, 8]
    got = values(
        mp.losses.group_length_scores(lengths, groups, [True, True, False, True, False, True])
    )
    assert got == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    wrong = values(mp.losses.group_length_scores(lengths, groups, [False] * 6))
    assert wrong == [0.0, 0.0, -0.5, 0.0, 0.0, 0.0]  # short is no merit of a wrong answer


def test_no_token_no_score():
    for scores in (
        mp.losses.soft_overlong_scores([0, 9], 5, 2),
        mp.losses.cosine_length_scores([0, 9], [True, False], 5),
        mp.losses.linear_length_scores([0, 9], 5),
        mp.losses.group_length_scores([0, 9], [0, 0], [True, False]),
    ):
        assert scores[0] == [] and len(scores[1]) == 1
    assert mp.losses.soft_overlong_scores([], 5, 2) == []


def test_lengths_are_whole_numbers_of_any_kind():
    for lengths in (torch.tensor([9, 3]), np.array([9, 3], dtype=np.uint8), (9, 3)):
        assert values(mp.losses.soft_overlong_scores(lengths, 10, 2, name="n")) == [-0.5, 0.0]
    assert mp.losses.soft_overlong_scores([9], 10, 2, name="n")[0][0].name == "n"
