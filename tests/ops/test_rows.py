"""Rows gathered, summed and scattered: torch's indexing, numpy's sum in order, in plain torch and by the kernels."""

import pytest
import torch
from support import gathers
from support.gathers import DTYPES, SHAPES, some_index
from support.kernels import running

import mmpack as mp
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.inverse import Inverse, inverse_index
from mmpack.ops.rows.scatter import scatter_rows

CPU = torch.device("cpu")
NUMBERS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]
each_path = pytest.mark.parametrize(
    "path",
    [
        "torch",
        pytest.param("triton", marks=pytest.mark.kernel),
        pytest.param("torch on a GPU", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture
def device(path, monkeypatch) -> torch.device:
    device = running(path.partition(" ")[0], monkeypatch)
    return torch.device("cuda") if path == "torch on a GPU" else device


def summed_in_order(values, index, num_rows, path="torch"):
    interpreted = path == "triton" and values.device.type == "cpu"
    return gathers.summed_in_order(values, index, num_rows, interpreted)


def both(x, index, weight, inverse=None):
    x = x.detach().requires_grad_()
    out = gather_rows(x, index, inverse=inverse)
    (grad,) = torch.autograd.grad(out, x, weight)
    return out.detach(), grad


@pytest.mark.few(12)
@each_path
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(path, device, shape, dtype):
    x = torch.randn(13, *shape, device=device).to(dtype)
    index = some_index(40, 13, device, torch.int32)
    weight = torch.randn(40, *shape, device=device).to(dtype)
    for inverse in (None, inverse_index(index, 13)):
        out, grad = both(x, index, weight, inverse)
        assert torch.equal(out, x[index.long()])
        assert torch.equal(grad, summed_in_order(weight, index, 13, path))
    index = torch.randperm(13).to(device)
    store = torch.randn(57, *shape, device=device).to(dtype)
    expected = store.index_copy(0, index, x)
    scatter_rows(store, index.int(), x)
    assert torch.equal(store, expected) and torch.equal(gather_rows(store, index), x)


@each_path
@pytest.mark.parametrize("width", [1, 4, 1176])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_without_gradients(path, device, width, dtype):
    x = torch.randint(0, 2, (9, width), device=device).to(dtype)
    index = some_index(300, 9, device, torch.int64)
    assert torch.equal(gather_rows(x, index), x[index])
    store, where = (
        torch.zeros(400, width, device=device).to(dtype),
        torch.randperm(400)[:9].to(device),
    )
    scatter_rows(store, where, x)
    assert torch.equal(store[where], x) and int(store.count_nonzero()) == int(x.count_nonzero())


@each_path
def test_rows_that_lie_anywhere(path, device):
    """Slices that are aligned to 2, 4, 8 bytes, transposed columns; payloads of NaN, and no byte beside them."""
    base = torch.randn(5000, device=device).bfloat16()
    index = some_index(30, 16, device, torch.int64)
    for start in (1, 2, 4, 8):
        x = base[start : start + 16 * 72].view(16, 72)
        assert torch.equal(gather_rows(x, index), x[index])
        weight = base[start + 3 : start + 3 + 30 * 72].view(30, 72)
        wanted = summed_in_order(weight, index, 16, path)
        assert torch.equal(both(x, index, weight)[1], wanted)
    x = base[: 16 * 72].view(72, 16).T
    assert torch.equal(gather_rows(x, index), x[index])
    short = base[:72].view(1, 72).expand(30, 72)
    assert torch.equal(both(x, index, short)[1], summed_in_order(short, index, 16, path))

    bits = torch.arange(-32768, 32767, device=device).to(torch.int16)
    index = torch.randperm(60)[:50].to(device)
    for values in (bits[1:1401].view(50, 28), bits[3:1403].view(28, 50).T):
        whole = torch.zeros(8 + 60 * 28, device=device, dtype=torch.bfloat16)
        store = whole[5:-3].view(60, 28)
        expected = store.view(torch.int16).index_copy(0, index, values.contiguous())
        scatter_rows(store, index, values.contiguous().view(torch.bfloat16))
        assert torch.equal(store.view(torch.int16), expected)
        assert not whole[:5].any() and not whole[-3:].any()


@each_path
@pytest.mark.parametrize("count", [0, 1, 128, pytest.param(13107, marks=pytest.mark.gpu)])
def test_company_changes_nothing(path, device, count):
    """A row's gradient is the same bits alone and among others, in any order of the rows."""
    x, weight = torch.randn(37, 300, device=device), torch.randn(count, 300, device=device) * 1e4
    index = some_index(count, 37, device, torch.int64)
    out, grad = both(x, index, weight)
    assert torch.equal(grad, summed_in_order(weight, index, 37))
    moved = torch.randperm(37).to(device)
    again, moved_grad = both(x[moved], moved.argsort()[index], weight)
    assert torch.equal(again, out) and torch.equal(moved_grad, grad[moved])
    own = weight[index == 5]
    alone, one = both(x[5:6], torch.zeros_like(index[index == 5]), own)
    assert torch.equal(alone, x[5].expand_as(alone)) and torch.equal(one[0], grad[5])


@each_path
def test_nan_stays_in_its_row(path, device):
    x, weight = torch.randn(6, 40, device=device), torch.randn(5, 40, device=device)
    x[2] = weight[3] = torch.nan
    index = torch.tensor([0, 1, 1, 5, 3], device=device)
    out, grad = both(x, index, weight)
    assert out.isfinite().all()
    assert grad[5].isnan().all() and grad[:5].isfinite().all() and not grad[[2, 4]].any()
    x = torch.randn(4, 3, device=device)
    out, grad = both(x, index[:0], weight[:0, :3])
    assert out.shape == (0, 3) and torch.equal(grad, torch.zeros_like(x))
    assert gather_rows(x[:0], index[:0]).shape == (0, 3)


def test_the_inverse_is_stable_and_gradients_have_gradients():
    index = some_index(50, 9, CPU, torch.int64)
    order, offsets = inverse_index(index, 9)
    for r in range(9):
        found = order[offsets[r] : offsets[r + 1]].tolist()
        assert found == [k for k, i in enumerate(index.tolist()) if i == r]
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gather_rows(x, index[:5]), x)


ONES, STORE = torch.ones(3), torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather_rows(torch.tensor(1.0), torch.zeros(1).long()), "a single number"),
        (lambda: gather_rows(ONES, torch.zeros(1)), "float32, expected one dimension"),
        (lambda: gather_rows(ONES, torch.zeros(1, 1).long()), r"shape \[1, 1\]"),
        (lambda: gather_rows(ONES, torch.tensor([0, 3])), r"from 0 to 3, expected \[0, 3\)"),
        (lambda: gather_rows(ONES, torch.tensor([-1])), "from -1 to -1"),
        (
            lambda: gather_rows(ONES, torch.tensor([0]), inverse=Inverse(*torch.zeros(2, 1).int())),
            "the inverse is for 0 rows, but x has 3",
        ),
        (lambda: gather_rows(ONES, torch.zeros(1, device="meta").long()), "is on meta"),
        (lambda: scatter_rows(STORE, torch.tensor([4]), torch.ones(1, 3)), "runs from 4 to 4"),
        (lambda: scatter_rows(STORE, torch.tensor([0]), torch.ones(1, 2)), "values have shape"),
        (lambda: scatter_rows(STORE.T, torch.tensor([0]), torch.ones(1, 4)), "is not contiguous"),
        (lambda: scatter_rows(STORE, torch.tensor([0]), STORE[1:2]), "share memory with out"),
        (
            lambda: scatter_rows(STORE, torch.tensor([0]), torch.ones(1, 3, requires_grad=True)),
            "it has no gradient",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(mp.ArgumentError, match=message):
        call()


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31st_value():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    x = torch.randn(2**19 + 8, 4099, device="cuda", dtype=torch.bfloat16)
    index = torch.tensor([2**19 + 7, 0, 2**19 + 6, 2**19 + 7], device="cuda")
    weight = torch.randn(4, 4099, device="cuda", dtype=torch.bfloat16)
    out, grad = both(x, index, weight)
    assert torch.equal(out, x[index])
    last = summed_in_order(weight[[0, 3]], torch.zeros(2).long(), 1)[0]
    assert torch.equal(grad[-1], last) and torch.equal(grad[-2], weight[2])
    assert not grad[1 : 2**19 + 6].any()
    grad.zero_()
    scatter_rows(grad, index[:3], weight[:3])
    assert torch.equal(grad[index[:3]], weight[:3])
    assert int(grad.count_nonzero()) == int(weight[:3].count_nonzero())
