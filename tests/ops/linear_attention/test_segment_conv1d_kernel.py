"""The convolution's kernels beside its plain version in float64: forests, widths that no block divides, dtypes."""

import importlib

import numpy as np
import pytest
import torch
from support.kernels import chosen, poison_outputs

from mmpack.ops.linear_attention import SEGMENT_CONV1D, plan_segments, segment_conv1d

pytestmark = pytest.mark.kernel
OFFSETS, PARENTS = [0, 1, 3, 3, 4, 9, 40, 41, 42, 70], [-1, 0, 1, 2, 0, -1, 5, 6, 5]


@pytest.fixture
def device(monkeypatch) -> torch.device:
    return chosen(SEGMENT_CONV1D, monkeypatch)


def run(tensors, plan, activation, upstream):
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    out = segment_conv1d(*leaves, plan=plan, activation=activation)
    wanted = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def exactly(monkeypatch, tensors, plan, activation, upstream):
    """In float64, which the kernels don't take, by plain torch."""
    wide = [x if x is None else x.double() for x in tensors]
    with monkeypatch.context() as plainly:
        plainly.setenv("MMPACK_BACKEND", "torch")
        return run(wide, plan, activation, upstream.double())


def drawn(device, rows, channels, taps, bias, dtype):
    made = torch.Generator().manual_seed(rows + taps)
    shapes = [(rows, channels), (channels, taps)] + [(channels,)] * bias + [(rows, channels)]
    out = [torch.randn(s, generator=made).to(device, dtype) for s in shapes]
    return (out[:-1] if bias else [*out[:-1], None]), out[-1]


@pytest.mark.parametrize(
    ("channels", "taps", "bias", "activation", "dtype"),
    [
        (130, 4, False, "silu", torch.float32),
        (130, 4, True, "silu", torch.bfloat16),
        (7, 4, True, None, torch.float32),
        (7, 3, False, "silu", torch.float16),
        (7, 1, True, "silu", torch.float32),
    ],
)
def test_values_and_gradients(device, monkeypatch, channels, taps, bias, activation, dtype):
    plan = plan_segments(np.array(OFFSETS), np.array(PARENTS))
    tensors, upstream = drawn(device, 70, channels, taps, bias, dtype)
    wanted = exactly(monkeypatch, tensors, plan.to(device), activation, upstream)
    poison_outputs(monkeypatch, device)
    found = run(tensors, plan.to(device), activation, upstream)
    bound = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("taps", [1, 2, 4, 6])
@pytest.mark.parametrize("rows", [4, 8])
def test_rows_of_several_programs(device, monkeypatch, rows, taps):
    """Segments that end within a program, at its end and a few rows behind it; branches far from their parent."""
    kernels = importlib.import_module("mmpack.ops.linear_attention.triton")
    monkeypatch.setattr(kernels, "ROWS", rows)
    monkeypatch.setattr(kernels, "BACKWARD_ROWS", rows)
    tensors, upstream = drawn(device, 70, 9, taps, True, torch.float32)
    ends = [0, 1, 4, 8, 9, 16, 18, 31, 33, 40, 47, 48, 64, 67, 70]
    random = np.random.default_rng(rows)
    parents = [-1, *(int(random.integers(-1, i)) for i in range(1, len(ends) - 1))]
    for segments in (parents, [-1, *range(len(ends) - 2)], [-1, *[0] * (len(ends) - 2)]):
        plan = plan_segments(np.array(ends), np.array(segments), conv_width=6).to(device)
        wanted = exactly(monkeypatch, tensors, plan, "silu", upstream)
        poison_outputs(monkeypatch, device)
        found = run(tensors, plan, "silu", upstream)
        for a, b in zip(found, wanted, strict=True):
            assert (a.double() - b).norm() <= 1e-6 * b.norm()


def test_columns_of_several_programs(device, monkeypatch):
    """And tensors that are not contiguous, with a frozen x."""
    kernels = importlib.import_module("mmpack.ops.linear_attention.triton")
    monkeypatch.setattr(kernels, "BLOCK_COLS", 4)
    monkeypatch.setattr(kernels, "FAR_COLS", 4)
    (x, weight, bias), upstream = drawn(device, 11, 9, 3, True, torch.float32)
    tensors = [x.T.contiguous().T, weight.T.contiguous().T, torch.stack([bias, bias], 1)[:, 0]]
    upstream = upstream.T.contiguous().T
    plan = plan_segments(np.array([0, 3, 5, 11]), np.array([-1, 0, 0]), conv_width=3).to(device)
    wanted = exactly(monkeypatch, tensors, plan, "silu", upstream)
    poison_outputs(monkeypatch, device)
    leaves = [x.detach().requires_grad_() for x in tensors]
    assert not any(x.is_contiguous() for x in leaves)
    out = segment_conv1d(*leaves, plan=plan)
    found = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    frozen = segment_conv1d(tensors[0], *leaves[1:], plan=plan)
    found += torch.autograd.grad(frozen, leaves[1:], upstream)
    for a, b in zip(found, wanted + wanted[2:], strict=True):
        assert (a.double() - b).norm() <= 1e-6 * b.norm()


def test_a_place_in_the_pack_changes_nothing(device, monkeypatch):
    """Wherever programs begin, a row's gradient has the same bits."""
    kernels = importlib.import_module("mmpack.ops.linear_attention.triton")
    monkeypatch.setattr(kernels, "BACKWARD_ROWS", 8)
    tensors, upstream = drawn(device, 40, 33, 4, True, torch.bfloat16)
    alone = run(
        tensors, plan_segments(np.array([0, 40]), np.array([-1])).to(device), "silu", upstream
    )
    for before in (1, 3, 6):
        filled = [torch.cat([x[:before], x]) for x in (tensors[0], upstream)]
        plan = plan_segments(np.array([0, before, before + 40]), np.array([-1, -1])).to(device)
        packed = run([filled[0], *tensors[1:]], plan, "silu", filled[1])
        assert all(torch.equal(a[before:], b) for a, b in zip(packed[:2], alone[:2], strict=True))


def test_rows_of_padding_and_none(device):
    tensors, upstream = drawn(device, 70, 5, 4, True, torch.float32)
    padding = np.arange(70) >= 60
    tensors[0][60:] = torch.nan
    plan = plan_segments(np.array([0, 30, 60]), np.array([-1, -1]), padding).to(device)
    out, gradient, *_ = run(tensors, plan, "silu", upstream)
    assert out[:60].isfinite().all() and gradient[:60].isfinite().all()
    none = plan_segments(np.array([0, 0]), np.array([-1])).to(device)
    empty = run([tensors[0][:0], *tensors[1:]], none, "silu", upstream[:0])
    assert empty[0].shape == (0, 5) and not empty[2].any()


def test_company_changes_nothing(device):
    """A sample's values and gradients have the bits that they have alone."""
    tensors, upstream = drawn(device, 70, 33, 4, True, torch.bfloat16)
    plan = plan_segments(np.array([0, 21, 25, 70]), np.array([-1, -1, -1])).to(device)
    packed = run(tensors, plan, "silu", upstream)
    for start, stop in ((0, 21), (21, 25), (25, 70)):
        own = plan_segments(np.array([0, stop - start]), np.array([-1])).to(device)
        alone = run([tensors[0][start:stop], *tensors[1:]], own, "silu", upstream[start:stop])
        assert all(
            torch.equal(a[start:stop], b) for a, b in zip(packed[:2], alone[:2], strict=True)
        )


def test_frozen_weights(device):
    tensors, upstream = drawn(device, 70, 33, 4, False, torch.float32)
    plan = plan_segments(np.array(OFFSETS), np.array(PARENTS)).to(device)
    for activation in ("silu", None):
        _, wanted, _ = run(tensors, plan, activation, upstream)
        x = tensors[0].clone().requires_grad_()
        out = segment_conv1d(x, tensors[1], plan=plan, activation=activation)
        assert torch.equal(torch.autograd.grad(out, x, upstream)[0], wanted)


def test_opcheck(device):
    (x, weight, bias), upstream = drawn(device, 9, 3, 4, True, torch.float32)
    plan = plan_segments(np.array([0, 5, 9]), np.array([-1, 0])).to(device)
    torch.library.opcheck(
        torch.ops.mmpack.segment_conv1d.default, (x, weight, bias, plan.previous, True)
    )
    arguments = (upstream, x, weight, bias, plan.previous, True, *plan.far, True)
    torch.library.opcheck(torch.ops.mmpack.segment_conv1d_backward.default, arguments)


@pytest.mark.gpu
def test_a_long_pack_of_real_width(device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("interpreted, it takes hours")
    offsets, parents = np.array([0, 1200, 2000, 2900, 4099]), np.array([-1, 0, 0, -1])
    plan = plan_segments(offsets, parents).to(device)
    tensors, upstream = drawn(device, 4099, 8192, 4, False, torch.bfloat16)
    found = run(tensors, plan, "silu", upstream)
    again = run(tensors, plan, "silu", upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    wanted = exactly(monkeypatch, tensors, plan, "silu", upstream)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()
