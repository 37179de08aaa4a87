"""ulps: beside numpy's spacing and nextafter, and counted on all float16 values."""

import numpy as np
import pytest
import torch
from chain.ulps import ulps
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError

KINDS = [(np.float16, torch.float16, 16), (np.float32, torch.float32, 32), (np.float64, torch.float64, 64)]  # fmt: skip
MOST = torch.iinfo(torch.int64).max


@pytest.mark.parametrize("kind, dtype, bits", KINDS)
@given(data=st.data())
def test_steps_of_nextafter(kind, dtype, bits, data):
    """As many steps as nextafter was taken, through powers of two, subnormals and 0."""
    value = kind(data.draw(st.floats(width=bits, allow_nan=False, allow_infinity=False)))
    steps = data.draw(st.integers(0, 40))
    other = value
    with np.errstate(over="ignore"):
        for _ in range(steps):
            other = np.nextafter(other, kind(-np.inf if value > 0 else np.inf))
    a, b = (torch.from_numpy(np.array([x])) for x in (value, other))
    assert a.dtype == dtype
    assert ulps(a, b).item() == ulps(b, a).item() == steps


@pytest.mark.parametrize("kind, dtype, bits", KINDS)
def test_spacing(kind, dtype, bits):
    """Within a binade, a difference over numpy's spacing."""
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(1, 2, 1000).astype(kind) for _ in range(2))
    expected = np.abs(a.astype(np.longdouble) - b) / np.spacing(kind(1))
    found = ulps(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    assert np.array_equal(found, expected.astype(np.int64)) and found.max() > 100


def test_every_float16_in_order():
    finite = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = np.unique(finite[np.isfinite(finite)])  # sorted; the two zeros are one
    x = torch.from_numpy(finite)
    assert (ulps(x[:-1], x[1:]) == 1).all()
    assert ulps(x[:1], x[-1:]).item() == len(x) - 1


def test_bfloat16_is_the_upper_half_of_float32():
    a = torch.tensor([1.0, -1.0, 256.0, 0.0], dtype=torch.bfloat16)
    b = torch.tensor([1 + 2**-7, -1 - 2**-6, 255.0, -0.0], dtype=torch.bfloat16)
    assert ulps(a, b).tolist() == [1, 2, 1, 0]


def test_what_is_no_number():
    a = torch.tensor([float("nan"), float("nan"), float("inf"), 1e308], dtype=torch.float64)
    b = torch.tensor([float("nan"), 1.0, float("inf"), -1e308], dtype=torch.float64)
    assert ulps(a, b).tolist() == [0, MOST, 0, MOST]


@pytest.mark.parametrize(
    "a, b, said",
    [
        ([1.0], torch.ones(1), "a is of type list"),
        (torch.ones(1), np.ones(1), "b is a numpy array"),
        (torch.ones(1, dtype=torch.int64), torch.ones(1), "a is torch.int64"),
        (torch.ones(1), torch.ones(2), r"\[1\] on cpu, b torch.float32 \[2\]"),
        (torch.ones(1), torch.ones(1).double(), "b torch.float64"),
    ],
)
def test_what_is_refused(a, b, said):
    with pytest.raises(ArgumentError, match=f"ulps: .*{said}.*Fix: "):
        ulps(a, b)
