"""torch's float32 positions without torch, bit for bit."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.video.policies.rules import torch_arange, torch_linspace


@settings(max_examples=150)
@given(st.integers(1, 60_000), st.integers(1, 400))
def test_arange(total, count):
    count = min(total, 2 * count)
    expected = torch.arange(0, total, total / count).numpy()
    np.testing.assert_array_equal(torch_arange(total, total / count), expected)


@settings(max_examples=150)
@given(st.integers(0, 60_000), st.integers(0, 60_000), st.integers(1, 768))
def test_linspace(start, length, count):
    expected = torch.linspace(start, start + length, count).numpy()
    np.testing.assert_array_equal(torch_linspace(start, start + length, count), expected)


def test_they_are_not_float64():
    """A frame that float64 rounds the other way; and steps that end past the last frame."""
    assert len(torch_arange(34, 34 / 14)) == 15 and torch_arange(34, 34 / 14)[-1] == 34
    exact = np.linspace(0, 29_124, 560).round()
    assert np.count_nonzero(torch_linspace(0, 29_124, 560).round() != exact) == 1
