"""Fixed blocks in Triton: what the kernels get. Sizes of blocks follow from head size and dtype alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mmpack.ops.attention.fixed_blocks import kernels
from mmpack.ops.attention.rule import Lengths
from mmpack.ops.tf32 import allows_tf32

LOG2_E = math.log2(math.e)
DELTA_ROWS = 64


class Blocks(NamedTuple):
    """Rows of a block of queries and of keys."""

    queries: int
    keys: int
    warps: int
    stages: int


class Passes(NamedTuple):
    forward: Blocks
    to_keys: Blocks
    to_queries: Blocks


HALF = Passes(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 2))
# heads beyond 128 take twice the memory, float32 too
WIDE = Passes(Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 1), Blocks(64, 32, 4, 1))
FULL = Passes(Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1))
ON_CPU = Passes(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1))


def passes_of(q: Tensor) -> Passes:
    if q.device.type == "cpu":
        return ON_CPU
    if q.dtype == torch.float32:
        return FULL
    return HALF if q.shape[-1] <= 128 else WIDE


def forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor]:
    """Values [T, heads, d], and log2 of each row's sum [heads, T] float32."""
    q, k, v = (_by_head(x) for x in (q, k, v))
    num_rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, num_rows, device=q.device)
    blocks = passes_of(q).forward
    if num_rows:
        with torch.cuda.device_of(q):
            kernels.forward_kernel[_grid_of_queries(lengths, blocks, heads)](
                q, k, v, out, lse, *lengths[:2], num_rows, *_strides(q, k, v, out), q.shape[2],
                scale * LOG2_E, **_constants(q, k, lengths, blocks),
            )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k and v."""
    q, k, v, grad = (_by_head(x) for x in (q, k, v, _contiguous(grad)))
    (num_rows, heads, size), kv_heads = q.shape, k.shape[1]
    to_q, to_k, to_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not num_rows:
        return to_q, to_k.zero_(), to_v.zero_()
    delta = torch.empty_like(lse)
    passes, strides = passes_of(q), _strides(q, k, v, grad)
    with torch.cuda.device_of(q):
        kernels.delta_kernel[(triton.cdiv(num_rows, DELTA_ROWS), heads)](
            out, grad, delta, num_rows, heads, size,
            ROWS=DELTA_ROWS, SIZE=_padded(size), num_warps=4,
        )  # fmt: skip
        count = len(lengths.cu_seqlens_q) - 1
        grid = triton.cdiv(lengths.max_seqlen_k, passes.to_keys.keys), kv_heads, count
        kernels.keys_kernel[grid](
            q, k, v, grad, lse, delta, to_k, to_v, *lengths[:2], num_rows, *strides, size, scale,
            **_constants(q, k, lengths, passes.to_keys),
        )  # fmt: skip
        kernels.queries_kernel[_grid_of_queries(lengths, passes.to_queries, heads)](
            q, k, v, grad, lse, delta, to_q, *lengths[:2], num_rows, *strides, size, scale,
            **_constants(q, k, lengths, passes.to_queries),
        )  # fmt: skip
    return to_q, to_k, to_v


def _grid_of_queries(lengths: Lengths, blocks: Blocks, heads: int) -> tuple[int, int, int]:
    """A block more than the queries fill: the first may start within one."""
    most = triton.cdiv(lengths.max_seqlen_q, blocks.queries) + 1
    return most, heads, len(lengths.cu_seqlens_q) - 1


def _constants(q: Tensor, k: Tensor, lengths: Lengths, blocks: Blocks) -> dict[str, Any]:
    tf32 = q.dtype == torch.float32 and allows_tf32()
    return {
        "CAUSAL": lengths.causal,
        "GROUPS": q.shape[1] // k.shape[1],
        "PRECISION": "tf32" if tf32 else "ieee",
        "QUERIES": blocks.queries,
        "KEYS": blocks.keys,
        "SIZE": _padded(q.shape[2]),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _padded(size: int) -> int:
    return int(max(triton.next_power_of_2(size), 16))


def _strides(*tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:2]]


def _by_head(x: Tensor) -> Tensor:
    """Rows of each head contiguous."""
    return x if x.stride(2) == 1 else _contiguous(x)


def _contiguous(x: Tensor) -> Tensor:
    """And aligned: a sum's order is the same wherever the tensor came from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
