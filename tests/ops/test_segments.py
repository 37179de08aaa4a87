"""Ordered sums against plain Python loops in exact arithmetic; bits that don't depend on the neighbours."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.ops.segments import keyed_sum, segment_ids, segment_sum, suffix_scan

lengths = st.lists(st.integers(0, 9), max_size=8)


def offsets(lens, dtype=torch.int32):
    return torch.tensor([0, *lens]).cumsum(0).to(dtype)


@given(lengths, st.integers(0, 2**31))
def test_segment_sum_is_the_exact_sum(lens, seed):
    x = torch.randn(sum(lens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = x.split(lens) if lens else []
    expected = torch.tensor([math.fsum(p.tolist()) for p in parts], dtype=torch.float64)
    torch.testing.assert_close(segment_sum(x, offsets(lens)), expected, rtol=0, atol=1e-14)


@given(lengths)
def test_segment_ids(lens):
    expected = [b for b, n in enumerate(lens) for _ in range(n)]
    assert segment_ids(offsets(lens), sum(lens)).tolist() == expected


def test_segment_sum_differentiates():
    x = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, offsets([4, 0, 5, 0])).square(), x)


def test_a_segment_has_the_same_bits_anywhere_and_keeps_its_nan():
    x = torch.randn(37, dtype=torch.float64)
    alone = segment_sum(x, offsets([37]))
    for before, after in ((1, 0), (13, 5), (64, 200)):
        around = torch.full((before,), torch.nan), torch.full((after,), torch.nan)
        sums = segment_sum(torch.cat([around[0], x, around[1]]), offsets([before, 37, after]))
        assert torch.equal(sums[1:2], alone)
        assert sums[0].isnan()


@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(0, 2**31))
def test_keyed_sum_is_the_exact_sum(keys, seed):
    x = torch.randn(len(keys), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = [
        math.fsum(v for v, other in zip(x.tolist(), keys, strict=True) if other == key)
        for key in keys
    ]
    got = keyed_sum(x, torch.tensor(keys, dtype=torch.int64))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_suffix_scan_against_a_loop(decay):
    x = torch.randn(23, dtype=torch.float64)
    stop = torch.tensor([5] * 5 + [6] + [23] * 17)
    expected = [sum(decay**k * x[i + k] for k in range(int(stop[i]) - i)) for i in range(23)]
    torch.testing.assert_close(suffix_scan(x, stop, decay), torch.stack(expected))
