"""gae against the backward loop of its paper in plain Python floats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.losses.gae import gae


def loop(rewards, values, after, gamma, lam):
    advantages, running = [], 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * after - value + gamma * lam * running
        advantages.append(running)
        after = value
    return advantages[::-1]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    st.sampled_from([1.0, 0.95, 0.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_against_the_loop(lengths, gamma, lam, cut_off, seed):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=g).unbind()
    after = torch.randn(len(lengths), generator=g)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    advantages, returns = gae(rewards, values, cu, gamma, lam, after if cut_off else None)
    expected = []
    for b, (r, v) in enumerate(zip(rewards.split(lengths), values.split(lengths), strict=True)):
        expected += loop(r.tolist(), v.tolist(), float(after[b]) if cut_off else 0.0, gamma, lam)
    expected = torch.tensor(expected, dtype=torch.float64)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(returns.double(), expected + values.double(), rtol=1e-6, atol=1e-6)


def test_long_samples_and_no_leak_between_them():
    rewards, values = torch.randn(2, 3000).unbind()
    rewards[0] = torch.nan
    advantages, _ = gae(rewards, values, torch.tensor([0, 1, 3000]), 0.999, 0.97)
    expected = loop(rewards[1:].tolist(), values[1:].tolist(), 0.0, 0.999, 0.97)
    torch.testing.assert_close(
        advantages[1:].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=2e-6
    )
    assert advantages[0].isnan()


def test_no_gradient_and_wrong_shapes():
    values = torch.zeros(3, requires_grad=True)
    assert not gae(torch.ones(3), values, torch.tensor([0, 3]))[0].requires_grad
    with pytest.raises(ArgumentError, match=r"bootstrap has shape \[2\] .* expected \[1\]"):
        gae(torch.ones(3), values, torch.tensor([0, 3]), bootstrap=torch.zeros(2))
    with pytest.raises(ArgumentError, match=r"values has shape \[2\]"):
        gae(torch.ones(3), torch.ones(2), torch.tensor([0, 3]))


@pytest.mark.gpu
def test_gpu_agrees_and_never_waits():
    rewards, values = torch.randn(2, 500).unbind()
    cu = torch.tensor([0, 120, 120, 500])
    expected = gae(rewards, values, cu, 0.99, 0.95)
    rewards, values, cu = rewards.cuda(), values.cuda(), cu.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = gae(rewards, values, cu, 0.99, 0.95)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close([x.cpu() for x in got], list(expected), rtol=1e-6, atol=1e-6)
