"""`product`, row sums and RMSNorm on a CPU: float64's values, and the same bits among any number of rows."""

import pytest
import torch
from torch.nn import functional as F

from mmpack.errors import ArgumentError
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.norms.rows import row_sum
from mmpack.ops.products.product import product

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 1e-3}
PARTS = [(0, 1), (3, 4), (130, 131), (5, 22), (60, 131)]


def draw(*sizes, dtype=torch.float32, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(37, 29), (256, 64), (1, 1), (300, 5)])
def test_products(depth, columns, dtype):
    x, w = draw(131, depth, dtype=dtype), draw(columns, depth, dtype=dtype, seed=1)
    bias = draw(columns, dtype=dtype, seed=2)
    whole = product(x, w.T, bias)
    expected = x.double() @ w.double().T + bias.double()
    assert whole.dtype == dtype and whole.is_contiguous()
    assert (whole - expected).norm() <= BOUND[dtype] * expected.norm()
    for a, b in PARTS:
        assert torch.equal(product(x[a:b], w.T, bias), whole[a:b])
    assert torch.equal(product(x.T.contiguous().T, w.T, bias), whole)
    batch = product(x[None].expand(2, -1, -1), w.T[None].expand(2, -1, -1))
    assert torch.equal(batch[1], product(x, w.T))
    if dtype != torch.float64:
        exact = product(x, w.T, out_dtype=torch.float32)
        assert exact.dtype == torch.float32
        assert (exact - x.double() @ w.double().T).abs().max() <= 1e-4


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


def test_empty_products():
    assert product(torch.ones(0, 3), torch.ones(3, 2)).shape == (0, 2)
    found = product(torch.ones(2, 0), torch.ones(0, 2), torch.tensor([1.0, 2.0]))
    assert found.tolist() == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 128, 1000])
def test_sums_and_norms(width, dtype):
    x, w, up = (draw(n, width, dtype=dtype, seed=s) for n, s in ((131, 0), (1, 1), (131, 2)))

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
        assert (got - want).norm() <= 2 * BOUND[dtype] * (want.norm() + width * (width == 1))
    assert (whole - x.double().sum(-1)).abs().max() <= BOUND[dtype] * width
    for a, b in PARTS:
        assert torch.equal(row_sum(x[a:b]), whole[a:b])
        for one, many in zip(norm(a, b)[:2], found[:2], strict=True):
            assert torch.equal(one, many[a:b])


def test_sums_of_empty_rows():
    for shape in ((2, 0), (0, 3), (0, 0)):
        assert torch.equal(row_sum(torch.ones(shape)), torch.ones(shape).sum(-1))


A = torch.ones(2, 3)


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
        (lambda: product(A, A.T, A[0, :2].double()), "bias is torch.float64"),
        (lambda: product(A, A.T, A[0, :2].to("meta")), "bias is torch.float32 on meta"),
        (lambda: row_sum(torch.tensor(1.0)), "expected"),
        (lambda: row_sum(A.to(torch.float8_e4m3fn)), "of floats"),
        (lambda: rms_norm(A[:, :0], A[0, :0]), r"x has shape \[2, 0\]"),
        (lambda: rms_norm(A, A[0].to("meta")), "weight torch.float32 on meta"),
        (lambda: rms_norm(A.to(torch.float8_e4m3fn), A[0]), "float8"),
        (lambda: row_sum(A.long()), "of floats"),
        (lambda: row_sum(None), "x is None"),
        (lambda: rms_norm(A, A[0, :2]), "weight"),
        (lambda: rms_norm(A, A), "weight"),
        (lambda: rms_norm(A.long(), A[0]), "floating"),
        (lambda: rms_norm(A, A[0], eps=float("nan")), "eps is nan"),
        (lambda: rms_norm(A, A[0], eps=-1), "eps is -1"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
