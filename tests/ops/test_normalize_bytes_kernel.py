"""normalize_bytes by Triton against numpy's indexing, bit for bit: on a GPU, else interpreted."""

import pytest
import torch
from support.byte_rows import indexed, some_bytes

from mmpack.ops.patches.normalize import normalize_bytes


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("patches", "dim"), [(0, 1176), (1, 3), (5, 1176), (3, 1536), (7, 588)])
def test_the_kernel(device, patches, dim, dtype):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off, in place of rounding")
    rows, values = some_bytes(patches, dim)
    made = normalize_bytes(rows.to(device), values.to(device), dtype)
    assert made.dtype == dtype and torch.equal(made.cpu(), indexed(rows, values, dtype))


@pytest.mark.kernel
def test_rows_at_an_odd_address(device):
    rows, values = some_bytes(9)
    shifted = rows.to(device).view(-1)[1 : 1 + 8 * 1176].view(8, 1176)
    made = normalize_bytes(shifted, values.to(device))
    assert torch.equal(made.cpu(), indexed(shifted.cpu(), values))


@pytest.mark.gpu
def test_more_bytes_than_int32_counts():
    patches = 2**31 // 1176 + 1000
    rows = torch.zeros(patches, 1176, dtype=torch.uint8, device="cuda")
    rows[-1] = torch.arange(1176, device="cuda").to(torch.uint8)
    _, values = some_bytes(1)
    made = normalize_bytes(rows, values.cuda(), torch.bfloat16)
    for at in (0, patches // 2, -1):
        assert torch.equal(
            made[at].cpu(), indexed(rows[at : at + 1 or None].cpu(), values, torch.bfloat16)[0]
        )
