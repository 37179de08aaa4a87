"""discounted_returns against the backward loop in Python floats, and scipy's recursive filter."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.losses.returns.returns import discounted_returns


def loop(rewards, gamma, after=0.0):
    out = []
    for reward in reversed(rewards):
        after = reward + gamma * after
        out.append(after)
    return out[::-1]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_against_the_loop(lengths, gamma, cut_off, seed):
    g = torch.Generator().manual_seed(seed)
    rewards, after = torch.randn(sum(lengths), generator=g), torch.randn(len(lengths), generator=g)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    got = discounted_returns(rewards, cu, gamma, after if cut_off else None)
    want = []
    for b, part in enumerate(rewards.split(lengths)):
        want += loop(part.tolist(), gamma, float(after[b]) if cut_off else 0.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


def test_long_segments_against_scipy():
    from scipy.signal import lfilter

    rewards = np.random.default_rng(0).normal(size=20_000)
    got = discounted_returns(torch.from_numpy(rewards), torch.tensor([0, 20_000]), 0.999)
    want = lfilter([1.0], [1.0, -0.999], rewards[::-1])[::-1]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6)


def test_a_segment_in_any_company():
    """The same bits alone and among others, and a NaN stays where it is."""
    part = torch.randn(300)
    alone = discounted_returns(part, torch.tensor([0, 300]), 0.97)
    others = torch.cat([torch.full((7,), torch.nan), part, torch.randn(50)])
    among = discounted_returns(others, torch.tensor([0, 7, 307, 307, 357]), 0.97)
    assert torch.equal(among[7:307], alone)
    assert among[:7].isnan().all() and among[7:].isfinite().all()


def test_nothing_to_learn_from():
    assert discounted_returns(torch.zeros(0), torch.tensor([0])).shape == (0,)
    assert discounted_returns(torch.zeros(0), torch.tensor([0, 0, 0])).shape == (0,)
    rewards = torch.ones(3, requires_grad=True)
    assert not discounted_returns(rewards, torch.tensor([0, 3])).requires_grad


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1.0], torch.tensor([0, 1])), "rewards is of type list, expected a tensor"),
        ((torch.ones(2), [0, 2]), "cu is of type list, expected a tensor"),
        ((torch.ones(2), torch.tensor([0, 3])), "cu runs from 0 to 3 for 2"),
        (
            (torch.ones(2).long(), torch.tensor([0, 2])),
            "rewards has shape [2] and dtype torch.int64",
        ),
        ((torch.ones(2), torch.tensor([0, 2]), 1.5), "gamma is 1.5"),
        ((torch.ones(2), torch.tensor([0, 2]), float("nan")), "gamma is nan"),
        ((torch.ones(2), torch.tensor([0, 2]), 1.0, torch.ones(3)), "bootstrap has shape [3]"),
    ],
)
def test_wrong_arguments_are_named(arguments, says):
    with pytest.raises(ArgumentError) as error:
        discounted_returns(*arguments)
    assert says in str(error.value) and "Fix: " in str(error.value)
