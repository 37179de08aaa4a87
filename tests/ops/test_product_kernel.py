"""The Triton kernels of products, row sums and RMSNorm: float64's values, and the same bits among any rows."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from mmpack.ops.norms import triton as norms
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.norms.rows import row_sum
from mmpack.ops.products import triton as kernels
from mmpack.ops.products.product import product
from mmpack.ops.products.tiles import all_tiles

pytestmark = pytest.mark.kernel
PARTS = [(0, 1), (40, 41), (69, 70), (3, 20), (5, 70)]
BOUND = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def draw(device, *sizes, dtype, seed=0):
    made = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))
    return made.to(device, dtype)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("depth", "columns"), [(72, 40), (37, 29), (8, 130)])
def test_products(device, depth, columns, dtype, no_tf32):
    x, w = draw(device, 70, depth, dtype=dtype), draw(device, columns, depth, dtype=dtype, seed=1)
    bias = draw(device, columns, dtype=dtype, seed=2)
    whole = product(x, w.T, bias)
    expected = x.double() @ w.double().T + bias.double()
    assert whole.dtype == dtype and whole.is_contiguous()
    assert (whole - expected).norm() <= BOUND[dtype] * expected.norm()
    for a, b in PARTS:
        assert torch.equal(product(x[a:b], w.T, bias), whole[a:b])
    for other in product(x.T.contiguous().T, w.T, bias), product(x, w.T.contiguous(), bias):
        if device.type == "cuda":
            assert torch.equal(other, whole)
        else:  # numpy, which interprets it, sums in the order of the memory
            assert (other.double() - whole.double()).norm() <= BOUND[dtype] * whole.double().norm()
    rows = x[:1].expand(70, -1)
    assert torch.equal(product(rows, w.T, bias), whole[:1].expand(70, -1))
    exact = product(whole.T, x, out_dtype=torch.float32)
    expected = whole.double().T @ x.double()
    assert (exact - expected).norm() <= min(BOUND[dtype], 4e-3) * expected.norm()
    batch = product(x[None].expand(2, -1, -1), w.T[None].expand(2, -1, -1))
    expected = x.double() @ w.double().T
    assert (batch - expected).norm() <= 2 * BOUND[dtype] * expected.norm()


def test_tiles_give_the_same_bits(device):
    x = draw(device, 70, 72, dtype=torch.bfloat16)
    w = draw(device, 40, 72, dtype=torch.bfloat16, seed=1)
    made = [kernels.product(x, w.T, None, torch.float32, t) for t in all_tiles(device)]
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_empty_products(device):
    a = torch.ones(0, 3, device=device)
    assert product(a, a.T @ a).shape == (0, 3) and product(a.T, a).tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("most", [8192, 16])  # a block holds a row; a row takes several
@pytest.mark.parametrize("dtype", BOUND)
def test_sums_and_norms(device, dtype, most, monkeypatch):
    monkeypatch.setattr(norms, "MOST", most)
    monkeypatch.setattr(norms, "WEIGHT_PROGRAMS", 3)
    monkeypatch.setattr(norms, "NARROW", 80)
    x, up = (draw(device, 70, 37, dtype=dtype, seed=s) for s in (0, 1))
    w = draw(device, 37, dtype=dtype, seed=2)

    def norm(a=0, b=None):
        leaves = x[a:b].clone().requires_grad_(), w.clone().requires_grad_()
        out = rms_norm(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, up[a:b])

    found, whole = norm(), row_sum(x)
    wide = x.double().requires_grad_(), w.double().requires_grad_()
    expected = F.rms_norm(wide[0], (37,), wide[1], 1e-6)
    expected.backward(up.double())
    for got, want in zip(found, [expected, *(t.grad for t in wide)], strict=True):
        assert (got - want).norm() <= BOUND[dtype] * want.norm()
    assert (whole - x.double().sum(-1)).abs().max() <= BOUND[dtype] * 20
    for a, b in PARTS:
        assert torch.equal(row_sum(x[a:b]), whole[a:b])
        assert torch.equal(row_sum(x[a:b].clone()), whole[a:b])
        for one, many in zip(norm(a, b)[:2], found[:2], strict=True):
            assert torch.equal(one, many[a:b])
