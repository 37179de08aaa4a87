"""The convolution over forests, held to transformers' own on each path by itself, in float64."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.linear_attention import conv_alone

from mmpack.errors import ArgumentError
from mmpack.ops.linear_attention import plan_segments, segment_conv1d

# A parent shorter than K-1, an empty one, a branch of one row, a chain of one-row segments.
OFFSETS, PARENTS = [0, 1, 3, 3, 4, 9, 10, 11, 12, 20], [-1, 0, 1, 2, 0, -1, 5, 6, 7]


def plan_of(offsets, parents, **options):
    return plan_segments(np.array(offsets), np.array(parents), **options)


def drawn(rows, channels, taps, bias, dtype):
    made = torch.Generator().manual_seed(rows + taps)
    shapes = [(rows, channels), (channels, taps)] + [(channels,)] * bias
    out = [torch.randn(s, generator=made, dtype=torch.float64).to(dtype) for s in shapes]
    return out if bias else [*out, None]


def values_and_gradients(run, tensors):
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    out = run(leaves)
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    wanted = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("taps", [4, 1, 2, 6])
def test_a_forest_is_its_paths_alone(activation, bias, dtype, bound, taps):
    tensors = drawn(20, 6, taps, bias, dtype)
    plan = plan_of(OFFSETS, PARENTS, conv_width=max(taps, 4))
    found = values_and_gradients(
        lambda x: segment_conv1d(*x, plan=plan, activation=activation), tensors
    )
    wide = [x if x is None else x.double() for x in tensors]
    wanted = values_and_gradients(lambda x: conv_alone(*x, activation, OFFSETS, PARENTS), wide)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype and (a - b).norm() <= bound * b.norm()


@st.composite
def forests(draw):
    parents, lengths = [], []
    for g in range(draw(st.integers(1, 9))):
        parents.append(draw(st.integers(-1, g - 1)))
        lengths.append(draw(st.integers(0, 4)))
    return [0, *np.cumsum(lengths).tolist()], parents


@settings(max_examples=20, deadline=None, derandomize=True)
@given(forests())
def test_any_forest(forest):
    offsets, parents = forest
    x, weight, _ = drawn(offsets[-1], 3, 4, False, torch.float64)
    found = segment_conv1d(x, weight, plan=plan_of(offsets, parents))
    if offsets[-1]:
        wanted = conv_alone(x, weight, None, "silu", offsets, parents)
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_bfloat16_rounds_once():
    x, weight, bias = drawn(20, 6, 4, True, torch.bfloat16)
    found = segment_conv1d(x, weight, bias, plan=plan_of(OFFSETS, PARENTS))
    wanted = conv_alone(x, weight, bias, "silu", OFFSETS, PARENTS)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-6)


def test_a_plain_sample_has_the_bits_that_it_has_alone():
    lengths = [5, 1, 700, 3, 64]
    offsets = [0, *np.cumsum(lengths).tolist()]
    x, weight, bias = drawn(offsets[-1], 37, 4, True, torch.float32)
    upstream = torch.randn(offsets[-1], 37, generator=torch.Generator().manual_seed(4))

    def run(x, plan, upstream):
        x = x.detach().requires_grad_()
        out = segment_conv1d(x, weight, bias, plan=plan)
        return out, torch.autograd.grad(out, x, upstream)[0]

    packed = run(x, plan_of(offsets, [-1] * len(lengths)), upstream)
    for start, stop in itertools.pairwise(offsets):
        here = slice(start, stop)
        alone = run(x[here], plan_of([0, stop - start], [-1]), upstream[here])
        assert all(torch.equal(a[here], b) for a, b in zip(packed, alone, strict=True))


def test_a_sample_does_not_read_the_one_before():
    """The fault of a plain convolution over a pack, which this test sees."""
    x, weight, _ = drawn(12, 3, 4, False, torch.float64)
    crossed = conv_alone(x, weight, None, "silu", [0, 12], [-1])
    wanted = conv_alone(x, weight, None, "silu", [0, 5, 12], [-1, -1])
    assert (crossed - wanted)[5:8].abs().max() > 1e-2
    found = segment_conv1d(x, weight, plan=plan_of([0, 5, 12], [-1, -1]))
    assert torch.allclose(found, wanted, rtol=1e-12)


def test_nan_of_padding_stays_there():
    x, weight, _ = drawn(12, 3, 4, False, torch.float32)
    padding = np.arange(12) >= 10
    padding[[0, 1, 4]] = True
    x[torch.from_numpy(padding)] = torch.nan
    x.requires_grad_()
    plan = plan_of([0, 5, 10], [-1, -1], padding=padding)
    out = segment_conv1d(x, weight, plan=plan)
    tokens = torch.from_numpy(~padding)
    assert out[tokens].isfinite().all()
    (gradient,) = torch.autograd.grad(out[tokens].sum(), x)
    assert gradient[tokens].isfinite().all()


def test_refusals():
    x, weight, bias = drawn(12, 3, 6, True, torch.float32)
    plan = plan_of([0, 12], [-1])
    with pytest.raises(ArgumentError, match="plan has rows of width 4, weight has K = 6"):
        segment_conv1d(x, weight, plan=plan)
    weight = weight[:, :4]
    with pytest.raises(ArgumentError, match="plan is for 12 rows, but there are 11"):
        segment_conv1d(x[:11], weight, plan=plan)
    with pytest.raises(ArgumentError, match=r"weight \[4, 3\]"):
        segment_conv1d(x, weight.T, plan=plan)
    with pytest.raises(ArgumentError, match="bias has shape"):
        segment_conv1d(x, weight, bias[:2], plan=plan)
    with pytest.raises(ArgumentError, match=r"bias is torch.complex64, expected a floating dtype"):
        segment_conv1d(x, weight, bias.to(torch.complex64), plan=plan)
    with pytest.raises(ArgumentError, match=r"weight is torch.int64, expected a floating dtype"):
        segment_conv1d(x, weight.long(), plan=plan)
    with pytest.raises(ArgumentError, match="plan is None, expected a SegmentPlan"):
        segment_conv1d(x, weight, plan=None)
    with pytest.raises(ArgumentError, match="activation is 'gelu'"):
        segment_conv1d(x, weight, plan=plan, activation="gelu")
