"""`product`, row sums and RMSNorm: float64's values, and the same bits among any number of rows."""

import pytest
import torch
from support.kernels import running
from torch.nn import functional as F

from mmpack.errors import ArgumentError
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.norms.rows import row_sum
from mmpack.ops.products.product import product

BOUND = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 1e-3}
PARTS = [(0, 1), (40, 41), (69, 70), (3, 20), (5, 70)]
each_path = pytest.mark.parametrize(
    ("path", "dtype"),
    [("torch", dtype) for dtype in BOUND]
    + [
        pytest.param("triton", dtype, marks=pytest.mark.kernel)
        for dtype in BOUND
        if dtype != torch.float64
    ],
)


@pytest.fixture
def device(path, monkeypatch, no_tf32) -> torch.device:
    return running(path, monkeypatch)


def draw(*sizes, device="cpu", dtype=torch.float32, seed=0):
    made = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))
    return made.to(device, dtype)


def bound(path, dtype):
    return BOUND[dtype] * (2 if path == "triton" and dtype != torch.float32 else 1)


@each_path
@pytest.mark.parametrize(("depth", "columns"), [(72, 40), (37, 29), (1, 1), (8, 130)])
def test_products(path, device, dtype, depth, columns):
    x, w = (draw(n, depth, device=device, dtype=dtype, seed=i) for i, n in enumerate((70, columns)))
    bias = draw(columns, device=device, dtype=dtype, seed=2)
    whole, off = product(x, w.T, bias), bound(path, dtype)
    expected = x.double() @ w.double().T + bias.double()
    assert whole.dtype == dtype and whole.is_contiguous()
    assert (whole - expected).norm() <= off * expected.norm()
    for a, b in PARTS:
        assert torch.equal(product(x[a:b], w.T, bias), whole[a:b])
    for other in product(x.T.contiguous().T, w.T, bias), product(x, w.T.contiguous(), bias):
        if path == "torch" or device.type == "cuda":
            assert torch.equal(other, whole) or path == "torch"
        # numpy, which interprets it, sums in the order of the memory
        assert (other.double() - whole.double()).norm() <= off * whole.double().norm()
    assert torch.equal(product(x.T.contiguous().T, w.T, bias), whole) or path == "triton"
    rows = x[:1].expand(70, -1)
    assert torch.equal(product(rows, w.T, bias), whole[:1].expand(70, -1))
    batch = product(x[None].expand(2, -1, -1), w.T[None].expand(2, -1, -1))
    assert torch.equal(batch[0], batch[1])
    expected = x.double() @ w.double().T
    assert (batch - expected).norm() <= 2 * off * expected.norm()
    if dtype != torch.float64:
        exact = product(x, w.T, out_dtype=torch.float32)
        assert exact.dtype == torch.float32
        assert (exact - expected).norm() <= min(off, 4e-3) * expected.norm()
    empty = torch.ones(0, 3, device=device, dtype=dtype)
    assert product(empty, w.new_ones(3, 2)).shape == (0, 2)
    assert product(empty.T, empty, w.new_ones(3)).tolist() == [[1.0] * 3] * 3


@pytest.mark.kernel
@pytest.mark.parametrize("path", ["triton"])
def test_tiles_give_the_same_bits(device):
    from mmpack.ops.products import triton as kernels
    from mmpack.ops.products.tiles import all_tiles

    x, w = (draw(n, 72, device=device, dtype=torch.bfloat16, seed=n) for n in (70, 40))
    made = [kernels.product(x, w.T, None, torch.float32, t) for t in all_tiles(device)]
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_gradients():
    """Of products, batches of them, and sums, against torch's own in float64."""
    x, w, bias, up = (draw(*s, seed=i) for i, s in enumerate([(70, 37), (37, 29), (29,), (70, 29)]))
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    wide = [t.double().requires_grad_() for t in (x, w, bias)]
    product(*leaves).backward(up)
    (wide[0] @ wide[1] + wide[2]).backward(up.double())
    assert all((a.grad - b.grad).abs().max() <= 1e-4 for a, b in zip(leaves, wide, strict=True))
    batch = x[None].clone().requires_grad_()
    product(batch, w[None]).backward(up[None])
    assert torch.equal(batch.grad[0], leaves[0].grad)
    row_sum(batch).backward(up[None, :, 0])
    assert torch.equal(batch.grad[0], leaves[0].grad + up[:, :1])


@each_path
@pytest.mark.parametrize("most", [8192, 16])  # a kernel's block holds a row; a row takes several
@pytest.mark.parametrize("width", [1, 37, 1000])
def test_sums_and_norms(path, device, dtype, most, width, monkeypatch):
    if path == "torch" and most == 16:
        pytest.skip("has no blocks")
    if path == "triton":
        from mmpack.ops.norms import triton as norms

        for name, value in (("MOST", most), ("WEIGHT_PROGRAMS", 3), ("NARROW", 80)):
            monkeypatch.setattr(norms, name, value)
    x, up, w = (draw(n, width, device=device, dtype=dtype, seed=n) for n in (70, 71, 1))
    up, off = up[:70], 2 * bound(path, dtype)

    def norm(a=0, b=None):
        leaves = x[a:b].clone().requires_grad_(), w[0].clone().requires_grad_()
        out = rms_norm(*leaves, eps=1e-5)
        return out.detach(), *torch.autograd.grad(out, leaves, up[a:b])

    whole, found = row_sum(x), norm()
    wide = x.double().requires_grad_(), w[0].double().requires_grad_()
    expected = F.rms_norm(wide[0], (width,), wide[1], 1e-5)
    expected.backward(up.double())
    for got, want in zip(found, [expected, *(t.grad for t in wide)], strict=True):
        assert got.dtype == dtype
        # of one number almost nothing is left of the gradient: an absolute bound
        assert (got - want).norm() <= off * (want.norm() + width * (width == 1))
    assert (whole - x.double().sum(-1)).abs().max() <= off * max(width, 20)
    for a, b in PARTS:
        assert torch.equal(row_sum(x[a:b]), whole[a:b])
        assert torch.equal(row_sum(x[a:b].clone()), whole[a:b])
        for one, many in zip(norm(a, b)[:2], found[:2], strict=True):
            assert torch.equal(one, many[a:b])
    for shape in ((2, 0), (0, 3), (0, 0)):
        some = torch.ones(shape, device=device, dtype=dtype)
        assert torch.equal(row_sum(some), some.sum(-1))


A, EIGHT = torch.ones(2, 3), torch.ones(2, 3).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: product([[1.0]], A), "a is of type list"),
        (lambda: product(A, A), r"a has shape \[2, 3\]"),
        (lambda: product(A[0], A), "a has shape"),
        (lambda: product(A[None], A.T), "a has shape"),
        (lambda: product(A[None], A.T.expand(2, 3, 2)), "a has shape"),
        (lambda: product(A, A.T.double()), "one floating dtype"),
        (lambda: product(A.long(), A.T.long()), "one floating dtype"),
        (lambda: product(A, A.T, A[0]), "bias has shape"),
        (lambda: product(A[None], A.T[None], A[0, :2]), "bias has shape"),
        (lambda: product(A, A.T, out_dtype=torch.bfloat16), "out_dtype is"),
        (lambda: product(A, A.T, A[0, :2].to("meta")), "bias is torch.float32 on meta"),
        (lambda: row_sum(torch.tensor(1.0)), "expected"),
        (lambda: row_sum(EIGHT), "of floats"),
        (lambda: row_sum(None), "x is None"),
        (lambda: rms_norm(A[:, :0], A[0, :0]), r"x has shape \[2, 0\]"),
        (lambda: rms_norm(A, A[0].to("meta")), "weight torch.float32 on meta"),
        (lambda: rms_norm(EIGHT, A[0]), "float8"),
        (lambda: rms_norm(A, A[0, :2]), "weight"),
        (lambda: rms_norm(A, A[0], eps=float("nan")), "eps is nan"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
