"""mmpack::scatter_rewards in one launch: a program writes the tokens of one sample, or a part of them."""

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
