"""gather_rows on the torch path: torch's indexing forward, numpy's sum in order backward; what is refused."""

import pytest
import torch
from support.gathers import DTYPES, SHAPES, some_index, summed_in_order

import mmpack as mp
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.inverse import Inverse, inverse_index

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given_inverse", [False, True])
def test_values_and_gradients(shape, dtype, given_inverse):
    x = torch.randn(13, *shape).to(dtype).requires_grad_()
    index = some_index(40, 13, CPU, torch.int32)
    inverse = inverse_index(index, 13) if given_inverse else None
    out = gather_rows(x, index, inverse=inverse)
    assert torch.equal(out, x[index.long()])
    weight = torch.randn(out.shape).to(dtype)
    (grad,) = torch.autograd.grad(out, x, weight)
    assert torch.equal(grad, summed_in_order(weight, index, 13))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_numbers_without_gradients(dtype):
    x = torch.randint(0, 2, (9, 3)).to(dtype)
    index = some_index(20, 9, CPU, torch.int64)
    assert torch.equal(gather_rows(x, index), x[index])


def test_nothing_to_read():
    x = torch.randn(4, 3, requires_grad=True)
    out = gather_rows(x, torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 3))
    assert gather_rows(torch.randn(0, 3), torch.zeros(0, dtype=torch.int32)).shape == (0, 3)


def test_the_inverse_is_stable():
    index = some_index(50, 9, CPU, torch.int64)
    order, offsets = inverse_index(index, 9)
    for r in range(9):
        found = order[offsets[r] : offsets[r + 1]].tolist()
        assert found == [k for k, i in enumerate(index.tolist()) if i == r]


def test_gradients_of_gradients():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 0, 2])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), x)
    assert torch.autograd.gradgradcheck(lambda x: gather_rows(x, index), x)


def test_opcheck():
    x = torch.randn(5, 3)
    index = torch.tensor([4, 0, 0, 2])
    for inverse in ((None, None), inverse_index(index, 5)):
        torch.library.opcheck(torch.ops.mmpack.gather_rows.default, (x, index))
        values = torch.randn(4, 3)
        torch.library.opcheck(torch.ops.mmpack.sum_rows.default, (values, index, *inverse, 5))


def test_compiles_in_one_piece():
    compiled = torch.compile(gather_rows, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (4, 9):
        x = torch.randn(5, 3, requires_grad=True)
        index = some_index(count, 5, CPU, torch.int64)
        out = compiled(x, index)
        assert torch.equal(out, x[index])
        (grad,) = torch.autograd.grad(out, x, out.detach())
        assert torch.equal(grad, summed_in_order(out.detach(), index, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather_rows(torch.tensor(1.0), torch.zeros(1).long()), "a single number"),
        (lambda: gather_rows(torch.ones(3), torch.zeros(1)), "float32, expected one dimension"),
        (lambda: gather_rows(torch.ones(3), torch.zeros(1, 1).long()), r"shape \[1, 1\]"),
        (
            lambda: gather_rows(torch.ones(3), torch.tensor([0, 3])),
            r"from 0 to 3, expected \[0, 3\)",
        ),
        (lambda: gather_rows(torch.ones(3), torch.tensor([-1])), "from -1 to -1"),
        (
            lambda: gather_rows(
                torch.ones(3), torch.tensor([0]), inverse=Inverse(*torch.zeros(2, 1).int())
            ),
            "the inverse is for 0 rows, but x has 3",
        ),
        (lambda: gather_rows(torch.ones(3), torch.zeros(1, device="meta").long()), "is on meta"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(mp.ArgumentError, match=message):
        call()
