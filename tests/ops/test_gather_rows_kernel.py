"""The gather's kernels: torch's indexing forward, numpy's sum in order backward, the same bits whatever lies around."""

import pytest
import torch
from support import gathers
from support.gathers import DTYPES, SHAPES, some_index
from support.kernels import chosen

from mmpack.ops.rows import GATHER_ROWS
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.inverse import inverse_index

pytestmark = pytest.mark.kernel


@pytest.fixture
def device(monkeypatch) -> torch.device:
    return chosen(GATHER_ROWS, monkeypatch)


def summed_in_order(values, index, num_rows):
    interpreted = values.device.type == "cpu"
    return gathers.summed_in_order(values, index, num_rows, interpreted)


def both(x, index, weight, inverse=None):
    """Values, and the gradient of a weighted sum; memory is poisoned, so that what is not written shows."""
    x = x.detach().requires_grad_()
    torch.use_deterministic_algorithms(True)  # torch fills new memory with NaN
    try:
        out = gather_rows(x, index, inverse=inverse)
        (grad,) = torch.autograd.grad(out, x, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    return out.detach(), grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device, shape, dtype):
    x = torch.randn(13, *shape, device=device).to(dtype)
    index = some_index(40, 13, device, torch.int32)
    weight = torch.randn(40, *shape, device=device).to(dtype)
    for inverse in (None, inverse_index(index, 13)):
        out, grad = both(x, index, weight, inverse)
        assert torch.equal(out, x[index.long()])
        assert torch.equal(grad, summed_in_order(weight, index, 13))


@pytest.mark.parametrize("width", [1, 4, 1176])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_numbers_without_gradients(device, width, dtype):
    x = torch.randint(0, 2, (9, width), device=device).to(dtype)
    index = some_index(300, 9, device, torch.int64)
    assert torch.equal(gather_rows(x, index), x[index])


def test_rows_that_lie_anywhere(device):
    """Slices that are aligned to 2, 4, 8 bytes, columns that are transposed."""
    base = torch.randn(5000, device=device).bfloat16()
    index = some_index(30, 16, device, torch.int64)
    for start in (1, 2, 4, 8):
        x = base[start : start + 16 * 72].view(16, 72)
        assert torch.equal(gather_rows(x, index), x[index])
        weight = base[start + 3 : start + 3 + 30 * 72].view(30, 72)
        assert torch.equal(both(x, index, weight)[1], summed_in_order(weight, index, 16))
    x = base[: 16 * 72].view(72, 16).T
    assert torch.equal(gather_rows(x, index), x[index])
    short = base[:72].view(1, 72).expand(30, 72)
    assert torch.equal(both(x, index, short)[1], summed_in_order(short, index, 16))


@pytest.mark.parametrize(
    "count", [0, 1, 127, 128, 129, *(pytest.param(n, marks=pytest.mark.gpu) for n in (4096, 13107))]
)
@pytest.mark.parametrize("width", [2, 300])
def test_company_changes_nothing(device, count, width):
    """A row's gradient is the same bits alone and among others, in any order of the rows."""
    rows = 37
    x = torch.randn(rows, width, device=device)
    index = some_index(count, rows, device, torch.int64)
    weight = torch.randn(count, width, device=device) * 1e4
    out, grad = both(x, index, weight)
    assert torch.equal(grad, summed_in_order(weight, index, rows))

    moved = torch.randperm(rows).to(device)
    again, moved_grad = both(x[moved], moved.argsort()[index], weight)
    assert torch.equal(again, out) and torch.equal(moved_grad, grad[moved])
    for row in (0, 5):
        alone, one = both(
            x[row : row + 1], torch.zeros_like(index[index == row]), weight[index == row]
        )
        assert torch.equal(alone, x[row].expand_as(alone)) and torch.equal(one[0], grad[row])


def test_nan_stays_in_its_row(device):
    x = torch.randn(6, 40, device=device)
    x[2] = torch.nan
    index = torch.tensor([0, 1, 1, 5, 3], device=device)
    assert gather_rows(x, index).isfinite().all()
    weight = torch.randn(5, 40, device=device)
    weight[3] = torch.nan
    grad = both(x, index, weight)[1]
    assert grad[5].isnan().all() and grad[:5].isfinite().all()
    assert torch.equal(grad[[2, 4]], torch.zeros(2, 40, device=device))


def test_opcheck(device):
    x = torch.randn(5, 3, device=device)
    index = torch.tensor([4, 0, 0, 2], device=device)
    torch.library.opcheck(torch.ops.mmpack.gather_rows.default, (x, index))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31st_value(device):
    x = torch.randn(2**19 + 8, 4099, device=device, dtype=torch.bfloat16)
    index = torch.tensor([2**19 + 7, 0, 2**19 + 6, 2**19 + 7], device=device)
    weight = torch.randn(4, 4099, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    out = gather_rows(x, index)
    assert torch.equal(out, x[index])
    (grad,) = torch.autograd.grad(out, x, weight)
    last = summed_in_order(weight[[0, 3]], torch.zeros(2).long(), 1)[0]
    assert torch.equal(grad[-1], last) and torch.equal(grad[-2], weight[2])
    assert not grad[1 : 2**19 + 6].any()


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    x = torch.randn(64, 512, device=device, requires_grad=True)
    index = some_index(256, 64, device, torch.int64)
    inverse = inverse_index(index, 64)
    weight = torch.randn(256, 512, device=device)

    def step():
        out = gather_rows(x, index, inverse=inverse)
        return out, *torch.autograd.grad(out, x, weight)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
        weight.normal_()
        index.copy_(index.roll(3))
        for kept, made in zip(inverse, inverse_index(index, 64), strict=True):
            kept.copy_(made)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    assert torch.equal(captured[1], summed_in_order(weight, index, 64))


@pytest.mark.gpu
def test_compiled_by_inductor(device):
    compiled = torch.compile(lambda x, i: gather_rows(x * 2, i) + 1, fullgraph=True)
    x = torch.randn(64, 512, device=device, requires_grad=True)
    index = some_index(256, 64, device, torch.int64)
    out = compiled(x, index)
    assert torch.equal(out, x[index] * 2 + 1)
    (grad,) = torch.autograd.grad(out, x, out.detach())
    assert torch.equal(grad, summed_in_order(out.detach(), index, 64) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_path_has_the_same_bits_on_a_gpu(device, dtype, monkeypatch):
    monkeypatch.setenv("MMPACK_BACKEND", "torch")
    for shape in ((), (3,), (2, 5)):
        x = torch.randn(13, *shape, device=device).to(dtype)
        index = some_index(400, 13, device, torch.int64)
        weight = torch.randn(400, *shape, device=device).to(dtype)
        out, grad = both(x, index, weight)
        assert torch.equal(out, x[index])
        assert torch.equal(grad, summed_in_order(weight, index, 13))
