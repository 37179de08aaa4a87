"""mmpack::scatter_rewards and mmpack::scatter_scores in one launch each, without atomics: a token has one writer.

scatter_rewards: a program writes the tokens of one sample, or a part of them. scatter_scores: it writes BLOCK tokens,
finds the piece of each by bisection, and adds up the piece's scores in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
PROGRAMS = 1024  # aimed at where samples are few and long


@triton.jit(do_not_specialize=["parts"])
def scatter_kernel(
    rewards, cu_loss, out, parts, weight: tl.float64, AT: tl.constexpr, BLOCK: tl.constexpr
):
    sample, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    start = tl.load(cu_loss + sample).to(tl.int32)
    stop = tl.load(cu_loss + sample + 1).to(tl.int32)
    value = tl.load(rewards + sample).to(tl.float64) * weight
    if AT == "mean":
        value = value / tl.maximum(stop - start, 1)
    for first in range(start + part * BLOCK, stop, parts * BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.zeros((BLOCK,), tl.float64) + value
        if AT == "last":
            values = tl.where(at == stop - 1, values, 0.0)
        tl.store(out + at, values, mask=at < stop)


def scatter_rewards(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    """Arguments and results of mmpack::scatter_rewards."""
    num_samples = len(rewards)
    out = cu_loss.new_empty(count, dtype=torch.float32)
    if count == 0:
        return out
    parts = max(1, min(triton.cdiv(count, num_samples * BLOCK), PROGRAMS // num_samples))
    with torch.cuda.device_of(out):
        scatter_kernel[(num_samples * parts,)](
            rewards.contiguous(),
            cu_loss.contiguous(),
            out,
            parts,
            weight,
            AT=at,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["pieces", "steps", "count"])
def table_kernel(
    values, index, factors, offsets, edges, out, pieces, steps, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    low = tl.zeros((BLOCK,), tl.int32)  # edges[low] <= at < edges[high]
    high = low + pieces
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(edges + middle, mask=live, other=0) <= at
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first = tl.load(offsets + low, mask=live, other=0).to(tl.int32)
    length = tl.load(offsets + low + 1, mask=live, other=0).to(tl.int32) - first
    total = tl.zeros((BLOCK,), tl.float64)
    for k in range(tl.max(length)):
        more = k < length
        term = tl.load(index + first + k, mask=more, other=0)
        value = tl.load(values + term, mask=more, other=0.0)
        if factors is not None:
            value = value * tl.load(factors + first + k, mask=more, other=0.0)
        total = tl.where(more, total + value, total)
    tl.store(out + at, total, mask=live)


def scatter_scores(
    values: Tensor,
    index: Tensor,
    factors: Tensor | None,
    offsets: Tensor,
    edges: Tensor,
    count: int,
    most: int,
) -> Tensor:
    """Arguments and results of mmpack::scatter_scores."""
    out = values.new_empty(count, dtype=torch.float32)
    if count == 0:
        return out
    pieces = len(edges) - 1
    with torch.cuda.device_of(out):
        table_kernel[(triton.cdiv(count, BLOCK),)](
            values.contiguous(),
            index.contiguous(),
            None if factors is None else factors.contiguous(),
            offsets.contiguous(),
            edges.contiguous(),
            out,
            pieces,
            (pieces - 1).bit_length(),
            count,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # value · factor is rounded before it is added, as on every device
        )
    return out
