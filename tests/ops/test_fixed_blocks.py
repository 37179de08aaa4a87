"""Attention by fixed blocks: float64's values, and the same bits alone, packed and behind a prefix."""

import numpy as np
import pytest
import torch
from support.kernels import running

from mmpack.ops.attention import plan_attention, plan_sequences, sequence_attention, tree_attention

HEADS, KV_HEADS, SIZE = 4, 2, 24
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}
PATHS = {
    "torch": (torch.float32, torch.float64, torch.bfloat16),
    "triton": (torch.float32, torch.bfloat16),
}


each_path = pytest.mark.parametrize(
    ("path", "dtype"),
    [
        pytest.param(path, dtype, marks=pytest.mark.kernel if path == "triton" else ())
        for path, dtypes in PATHS.items()
        for dtype in dtypes
    ],
)


@pytest.fixture
def device(path, monkeypatch, no_tf32) -> torch.device:
    return running(path, monkeypatch)


def lengths_of(device):
    """Beside blocks of 64 rows in plain torch, of 16 in the interpreter, of 32 to 128 on a GPU."""
    return [1, 127, 128, 129, 700, 64] if device.type == "cuda" else [1, 16, 63, 64, 65, 130, 7]


def draw(device, dtype, rows):
    """q, k, v and a gradient of the output, heads before rows; q lies so in memory, k and v row by row."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, rows, SIZE, generator=generator)
    k, v = torch.randn(2, 1, rows, KV_HEADS, SIZE, generator=generator).transpose(2, 3)
    up = torch.randn(1, rows, HEADS, SIZE, generator=generator)
    return [x.to(device, dtype) for x in (q, k, v, up)]


def attended(tensors, rows, until, backend="fixed_blocks"):
    """Of these rows: values, gradients to queries, keys and values, and log-sum-exp; rows first."""
    *inputs, up = tensors
    plan = plan_attention(until, np.zeros(len(until), dtype=bool))
    seen = torch.from_numpy(until.astype(np.int32)).to(up.device)
    leaves = [x[:, :, rows].detach().requires_grad_() for x in inputs]
    out, lse = tree_attention(*leaves, seen, plan, backend=backend, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, up[:, rows])
    found = [g[0].transpose(0, 1) for g in gradients]
    return [out.detach()[0], *found, lse.detach()[0].T]


@each_path
def test_values_and_gradients(device, dtype):
    """A prompt with branches, then plain sequences, beside sdpa in float64."""
    lengths = lengths_of(device)
    total = 2 * sum(lengths)
    ends = lengths[0] + np.cumsum(lengths[1:])
    shared = np.append(np.full(lengths[0], ends[-1]), np.repeat(ends, lengths[1:]))
    plain = sum(lengths) + np.repeat(np.cumsum(lengths), lengths)
    tensors, until = draw(device, dtype, total), np.append(shared, plain)
    found = attended(tensors, slice(None), until)
    expected = attended([x.double() for x in tensors], slice(None), until, "sdpa")
    for got, want in zip(found, expected, strict=True):
        wide = torch.promote_types(dtype, torch.float32)
        assert got.dtype == (wide if got is found[-1] else dtype)
        assert (got.double() - want).norm() <= BOUND[dtype] * want.norm()


@each_path
def test_a_sequences_bits_are_its_own(device, dtype):
    lengths = lengths_of(device)
    tensors, ends = draw(device, dtype, sum(lengths)), np.cumsum(lengths)
    packed = attended(tensors, slice(None), np.repeat(ends, lengths))
    for length, end in zip(lengths, ends, strict=True):
        rows = slice(end - length, end)
        alone = attended(tensors, rows, np.full(length, length))
        for one, all_rows in zip(alone, packed, strict=True):
            assert torch.equal(one, all_rows[rows])


@each_path
@pytest.mark.parametrize("prompt", [1, 16, 63, 64, 100])
def test_a_branchs_bits_are_its_own(device, dtype, prompt):
    """Values of all rows, and gradients to the queries of a branch."""
    branches = [1, 17, 64, 70]
    ends = prompt + np.cumsum(branches)
    tensors = draw(device, dtype, ends[-1])
    until = np.append(np.full(prompt, ends[-1]), np.repeat(ends, branches))
    shared = attended(tensors, slice(None), until)
    for count, end in zip(branches, ends, strict=True):
        rows = torch.cat([torch.arange(prompt), torch.arange(end - count, end)])
        alone = attended(tensors, rows.to(device), np.full(len(rows), len(rows)))
        assert torch.equal(alone[0], shared[0][rows]) and torch.equal(alone[-1], shared[-1][rows])
        assert torch.equal(alone[1][prompt:], shared[1][rows[prompt:]])


@each_path
def test_rows_that_see_both_ways(device, dtype):
    """A tower's sequences: beside sdpa, and each by itself."""
    lengths = [30, 64, 1, 70]
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 24).to(device, dtype)
    found = sequence_attention(q, k, v, plan_sequences(lengths), backend="fixed_blocks")
    expected = sequence_attention(
        q.double(), k.double(), v.double(), plan_sequences(lengths), backend="sdpa"
    )
    assert (found - expected).norm() <= BOUND[dtype] * expected.norm()
    start = 0
    for n in lengths:
        rows = slice(start, start := start + n)
        part = (x[:, :, rows] for x in (q, k, v))
        alone = sequence_attention(*part, plan_sequences([n]), backend="fixed_blocks")
        assert torch.equal(alone, found[:, rows])
