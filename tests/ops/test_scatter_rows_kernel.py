"""The scatter's kernel: torch's index_copy, bit for bit, and no byte beside it."""

import pytest
import torch
from support.gathers import DTYPES, SHAPES
from support.kernels import chosen

from mmpack.ops.rows import SCATTER_ROWS
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.scatter import scatter_rows

pytestmark = pytest.mark.kernel


@pytest.fixture
def device(monkeypatch) -> torch.device:
    return chosen(SCATTER_ROWS, monkeypatch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_are_written_and_others_stay(device, shape, dtype, kind):
    out = torch.randn(57, *shape, device=device).to(dtype)
    values = torch.randn(40, *shape, device=device).to(dtype)
    index = torch.randperm(57)[:40].to(device, kind)
    expected = out.index_copy(0, index.long(), values)
    scatter_rows(out, index, values)
    assert torch.equal(out, expected)
    assert torch.equal(gather_rows(out, index), values)


@pytest.mark.parametrize("width", [1, 4, 1176])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_numbers(device, width, dtype):
    out = torch.randint(0, 2, (400, width), device=device).to(dtype)
    values = torch.randint(0, 2, (300, width), device=device).to(dtype)
    index = torch.randperm(400)[:300].to(device)
    expected = out.cpu().index_copy(0, index.cpu(), values.cpu())
    scatter_rows(out, index, values)
    assert torch.equal(out.cpu(), expected)


def test_nan_bits_and_values_that_lie_anywhere(device):
    """Payloads of NaNs and negative zeros; values that are a slice aligned to 2 bytes, or transposed."""
    raw = torch.arange(-32768, 32767, device=device).to(torch.int16)
    base = raw.view(torch.bfloat16)
    index = torch.randperm(60)[:50].to(device)
    for values in (base[1:1401].view(50, 28), base[3:1403].view(28, 50).T):
        out = torch.zeros(60, 28, device=device, dtype=torch.bfloat16)
        expected = out.view(torch.int16).index_copy(0, index, values.contiguous().view(torch.int16))
        scatter_rows(out, index, values)
        assert torch.equal(out.view(torch.int16), expected)


def test_a_store_that_is_a_slice(device):
    base = torch.zeros(8 + 30 * 7, device=device, dtype=torch.float32)
    out = base[5:-3].view(30, 7)
    values = torch.randn(12, 7, device=device)
    index = torch.randperm(30)[:12].to(device)
    scatter_rows(out, index, values)
    assert torch.equal(out[index], values)
    assert not base[:5].any() and not base[-3:].any()


@pytest.mark.gpu
def test_more_than_2_31_values():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    out = torch.zeros(1_100_000, 2_048, device="cuda", dtype=torch.bfloat16)
    index = torch.tensor([1_099_999, 0, 1_048_577], device="cuda")
    values = torch.randn(3, 2_048, device="cuda", dtype=torch.bfloat16)
    scatter_rows(out, index, values)
    assert torch.equal(out[index], values) and int(out.count_nonzero()) == int(
        values.count_nonzero()
    )
    assert torch.equal(gather_rows(out, index), values)
