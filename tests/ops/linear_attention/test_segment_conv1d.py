"""The convolution over forests, held to transformers' own on each path by itself, in float64; plain and by kernels."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import poison_outputs, running
from support.linear_attention import conv_alone, forests

from mmpack.errors import ArgumentError
from mmpack.ops.linear_attention import plan_segments, segment_conv1d

# Parents shorter than K-1, an empty one, a branch of one row, a chain of one-row segments, branches far away.
OFFSETS, PARENTS = [0, 1, 3, 3, 4, 9, 40, 41, 42, 70], [-1, 0, 1, 2, 0, -1, 5, 6, 5]
BOUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
PATHS = ["torch", pytest.param("triton", marks=pytest.mark.kernel)]
each_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture
def device(path, monkeypatch) -> torch.device:
    return running(path, monkeypatch)


def plan_of(offsets, parents, device="cpu", **options):
    return plan_segments(np.array(offsets), np.array(parents), **options).to(device)


def drawn(device, rows, channels, taps, bias, dtype):
    """x, weight and bias, and what comes in."""
    made = torch.Generator().manual_seed(rows + taps)
    shapes = [(rows, channels), (channels, taps), (channels,), (rows, channels)]
    x, weight, last, up = (torch.randn(s, generator=made).to(device, dtype) for s in shapes)
    return [x, weight, last if bias else None], up


def values_and_gradients(run, tensors, upstream):
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    wanted = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def check(tensors, upstream, offsets, parents, activation="silu", conv_width=4):
    plan = plan_of(offsets, parents, upstream.device, conv_width=max(conv_width, 4))
    run = lambda *x: segment_conv1d(*x, plan=plan, activation=activation)  # noqa: E731
    found = values_and_gradients(run, tensors, upstream)
    wide = [x if x is None else x.double() for x in tensors]
    alone = lambda *x: conv_alone(*x, activation, offsets, parents)  # noqa: E731
    for a, b in zip(found, values_and_gradients(alone, wide, upstream), strict=True):
        assert a.dtype == upstream.dtype and a.shape == b.shape
        assert (a.double() - b).norm() <= BOUND[a.dtype] * b.norm()


@pytest.mark.parametrize(
    ("path", "dtype"),
    [("torch", torch.float64), ("torch", torch.float32), ("torch", torch.bfloat16)]
    + [
        pytest.param("triton", dtype, marks=pytest.mark.kernel)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ],
)
@pytest.mark.parametrize(
    ("channels", "taps", "bias", "activation"),
    [
        (130, 4, False, "silu"),
        (7, 4, True, None),
        (7, 2, False, "silu"),
        (7, 1, True, "silu"),
        (7, 6, True, "silu"),
    ],
)
def test_a_forest_is_its_paths_alone(device, dtype, channels, taps, bias, activation, monkeypatch):
    tensors, upstream = drawn(device, 70, channels, taps, bias, dtype)
    poison_outputs(monkeypatch, device)
    check(tensors, upstream, OFFSETS, PARENTS, activation, taps)


@settings(max_examples=20)
@given(forests(9, st.integers(0, 4)))
def test_any_forest(forest):
    offsets, parents = forest
    tensors, upstream = drawn("cpu", offsets[-1], 3, 4, False, torch.float64)
    if offsets[-1]:
        check(tensors, upstream, offsets, parents)
    else:
        assert segment_conv1d(*tensors, plan=plan_of(offsets, parents)).shape == (0, 3)


@pytest.mark.kernel
@pytest.mark.parametrize("path", ["triton"])
@pytest.mark.parametrize("taps", [1, 2, 4, 6])
@pytest.mark.parametrize("rows", [4, 8])
def test_rows_and_columns_of_several_programs(device, monkeypatch, rows, taps):
    """Segments that end within a program, at its end and a few rows behind it; branches far from their parent."""
    from mmpack.ops.linear_attention import triton as kernels

    sizes = {"ROWS": rows, "BACKWARD_ROWS": rows, "BLOCK_COLS": 4, "FAR_COLS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(kernels, name, value)
    tensors, upstream = drawn(device, 70, 9, taps, True, torch.float32)
    ends = [0, 1, 4, 8, 9, 16, 18, 31, 33, 40, 47, 48, 64, 67, 70]
    random = np.random.default_rng(rows)
    parents = [-1, *(int(random.integers(-1, i)) for i in range(1, len(ends) - 1))]
    poison_outputs(monkeypatch, device)
    for segments in (parents, [-1, *range(len(ends) - 2)], [-1, *[0] * (len(ends) - 2)]):
        check(tensors, upstream, ends, segments, conv_width=6)


@each_path
def test_what_is_frozen_and_tensors_that_lie_anywhere(path, device):
    (x, weight, bias), upstream = drawn(device, 70, 9, 4, True, torch.float32)
    apart = [x.T.contiguous().T, weight.T.contiguous().T, torch.stack([bias, bias], 1)[:, 0]]
    check(apart, upstream.T.contiguous().T, OFFSETS, PARENTS)
    plan = plan_of(OFFSETS, PARENTS, device)
    for activation in ("silu", None):
        run = lambda *y, a=activation: segment_conv1d(*y, plan=plan, activation=a)  # noqa: E731
        _, *wanted = values_and_gradients(run, (x, weight, bias), upstream)
        for trained in ((0,), (1, 2)):
            own = [t.clone().requires_grad_(i in trained) for i, t in enumerate((x, weight, bias))]
            found = torch.autograd.grad(run(*own), [own[i] for i in trained], upstream)
            assert all(torch.equal(a, wanted[i]) for a, i in zip(found, trained, strict=True))


@each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_has_the_bits_that_it_has_alone(path, device, dtype, monkeypatch):
    """Wherever programs begin, and whatever is packed around it."""
    if path == "triton":
        monkeypatch.setattr("mmpack.ops.linear_attention.triton.BACKWARD_ROWS", 8)
    lengths = [5, 1, 700, 3, 64] if path == "torch" else [3, 40, 6, 21]
    offsets = [0, *np.cumsum(lengths).tolist()]
    (x, *weights), upstream = drawn(device, offsets[-1], 37, 4, True, dtype)

    def run(rows, offsets, parents):
        plan = plan_of(offsets, parents, device)
        inputs = [x[rows], *weights]
        return values_and_gradients(
            lambda *y: segment_conv1d(*y, plan=plan), inputs, upstream[rows]
        )

    packed = run(slice(None), offsets, [-1] * len(lengths))
    for start, stop in itertools.pairwise(offsets):
        here = slice(start, stop)
        alone = run(here, [0, stop - start], [-1])
        assert all(torch.equal(a[here], b) for a, b in zip(packed[:2], alone[:2], strict=True))


@each_path
def test_a_sample_does_not_read_the_one_before_nor_padding(path, device):
    """The fault of a plain convolution over a pack, which this test sees."""
    (x, weight, _), upstream = drawn(device, 12, 3, 4, False, torch.float32)
    crossed = conv_alone(x, weight, None, "silu", [0, 12], [-1])
    wanted = conv_alone(x, weight, None, "silu", [0, 5, 12], [-1, -1])
    assert (crossed - wanted)[5:8].abs().max() > 1e-2
    check([x, weight, None], upstream, [0, 5, 12], [-1, -1])
    padding = np.arange(12) >= 10
    padding[[0, 1, 4]] = True
    tokens = torch.from_numpy(~padding).to(device)
    x[~tokens] = torch.nan
    plan = plan_of([0, 5, 10], [-1, -1], device, padding=padding)
    upstream[~tokens] = 0
    out, gradient, _ = values_and_gradients(
        lambda *y: segment_conv1d(*y, plan=plan), [x, weight, None], upstream
    )
    assert out[tokens].isfinite().all() and gradient[tokens].isfinite().all()


def test_refusals():
    (x, weight, bias), _ = drawn("cpu", 12, 3, 6, True, torch.float32)
    plan, short = plan_of([0, 12], [-1]), weight[:, :4]
    for arguments, options, message in (
        ((x, weight), {}, "plan has rows of width 4, weight has K = 6"),
        ((x[:11], short), {}, "plan is for 12 rows, but there are 11"),
        ((x, short.T), {}, r"weight has shape \[4, 3\], expected \[3, K\]"),
        ((x, short, bias[:2]), {}, "bias has shape"),
        ((x, short, bias.to(torch.complex64)), {}, "bias is torch.complex64, expected a floating"),
        ((x, short.long()), {}, r"weight is torch.int64, expected a floating dtype"),
        ((x, short), {"plan": None}, "plan is None, expected a SegmentPlan"),
        ((x, short), {"activation": "gelu"}, "activation is 'gelu'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            segment_conv1d(*arguments, **({"plan": plan} | options))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["triton"])
def test_a_long_pack_of_real_width(device, monkeypatch):
    tensors, upstream = drawn(device, 4099, 8192, 4, False, torch.bfloat16)
    offsets, parents = [0, 1200, 2000, 2900, 4099], [-1, 0, 0, -1]
    plan = plan_of(offsets, parents, device)
    run = lambda *x: segment_conv1d(*x, plan=plan)  # noqa: E731
    found = values_and_gradients(run, tensors, upstream)
    assert all(map(torch.equal, found, values_and_gradients(run, tensors, upstream)))
    monkeypatch.setenv("MMPACK_BACKEND", "torch")
    wide = [x if x is None else x.double() for x in tensors]
    for a, b in zip(found, values_and_gradients(run, wide, upstream), strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()
