"""Checks of attention by fixed blocks that its plain version and its kernels share."""

from __future__ import annotations

import numpy as np
import torch

from mmpack.ops.attention import plan_attention, tree_attention

HEADS, KV_HEADS, SIZE = 4, 2, 24
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}
Rows = slice | torch.Tensor


def draw(device: torch.device, dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, heads before rows; q lies so in memory, k and v row by row."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, rows, SIZE, generator=generator)
    k, v = torch.randn(2, 1, rows, KV_HEADS, SIZE, generator=generator).transpose(2, 3)
    up = torch.randn(1, rows, HEADS, SIZE, generator=generator)
    return [x.to(device, dtype) for x in (q, k, v, up)]


def attended(
    tensors: list[torch.Tensor], rows: Rows, until: np.ndarray, backend: str = "fixed_blocks"
) -> list[torch.Tensor]:
    """Of these rows: values, gradients to queries, keys and values, and log-sum-exp; rows first."""
    *inputs, up = tensors
    plan = plan_attention(until, np.zeros(len(until), dtype=bool))
    seen = torch.from_numpy(until.astype(np.int32)).to(up.device)
    leaves = [x[:, :, rows].detach().requires_grad_() for x in inputs]
    out, lse = tree_attention(*leaves, seen, plan, backend=backend, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, up[:, rows])
    found = [g[0].transpose(0, 1) for g in gradients]
    return [out.detach()[0], *found, lse.detach()[0].T]


def assert_values(device: torch.device, dtype: torch.dtype, lengths: list[int]) -> None:
    """A prompt with branches, then plain sequences, beside sdpa in float64."""
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


def assert_sequences_have_their_own_bits(
    device: torch.device, dtype: torch.dtype, lengths: list[int]
) -> None:
    tensors, ends = draw(device, dtype, sum(lengths)), np.cumsum(lengths)
    packed = attended(tensors, slice(None), np.repeat(ends, lengths))
    for length, end in zip(lengths, ends, strict=True):
        rows = slice(end - length, end)
        alone = attended(tensors, rows, np.full(length, length))
        for one, all_rows in zip(alone, packed, strict=True):
            assert torch.equal(one, all_rows[rows])


def assert_shared_rows_have_their_own_bits(
    device: torch.device, dtype: torch.dtype, prompt: int, branches: list[int]
) -> None:
    """Values of all rows, and gradients to the queries of a branch."""
    ends = prompt + np.cumsum(branches)
    tensors = draw(device, dtype, ends[-1])
    until = np.append(np.full(prompt, ends[-1]), np.repeat(ends, branches))
    shared = attended(tensors, slice(None), until)
    for count, end in zip(branches, ends, strict=True):
        rows = torch.cat([torch.arange(prompt), torch.arange(end - count, end)])
        alone = attended(tensors, rows.to(device), np.full(len(rows), len(rows)))
        assert torch.equal(alone[0], shared[0][rows]) and torch.equal(alone[-1], shared[-1][rows])
        assert torch.equal(alone[1][prompt:], shared[1][rows[prompt:]])
