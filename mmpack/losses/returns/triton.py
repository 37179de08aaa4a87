"""mmpack::segment_returns in one launch: a program walks its segment from the end, BLOCK elements at a time.

Blocks are counted from the segment's start: the bits of a segment depend on it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def joined(right_decay, right_sum, left_decay, left_sum):
    """Two neighbouring stretches as one; the scan comes from the right."""
    return right_decay * left_decay, left_sum + left_decay * right_sum


@triton.jit(do_not_specialize=["count"])
def returns_kernel(
    rewards,
    values,
    bootstrap,
    cu,
    out,
    count,
    gamma: tl.float64,
    decay: tl.float64,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0)
    start = tl.load(cu + segment).to(tl.int32)
    stop = tl.load(cu + segment + 1).to(tl.int32)
    after = (start * 0).to(tl.float64)
    if bootstrap is not None:
        after = tl.load(bootstrap + segment).to(tl.float64)
    carried = after * 0
    blocks = tl.cdiv(stop - start, BLOCK)
    for k in range(blocks):
        at = start + (blocks - 1 - k) * BLOCK + tl.arange(0, BLOCK)
        live = at < stop
        term = tl.load(rewards + at, mask=live, other=0).to(tl.float64)
        if values is not None:
            value = tl.load(values + at, mask=live, other=0).to(tl.float64)
            following = tl.load(values + at + 1, mask=at + 1 < stop, other=0).to(tl.float64)
            following = tl.where(at + 1 == stop, after, following)
            term = term + gamma * following - value
        else:
            term = tl.where(at + 1 == stop, term + gamma * after, term)
        term = tl.where(live, term, 0.0)
        decays = tl.where(live, tl.zeros((BLOCK,), tl.float64) + decay, 1.0)
        decays, sums = tl.associative_scan((decays, term), 0, joined, reverse=True)
        if k > 0:
            sums = sums + decays * carried
        carried = tl.sum(tl.where(tl.arange(0, BLOCK) == 0, sums, 0.0))
        tl.store(out + at, sums, mask=live)
        if values is not None:
            tl.store(out + count + at, sums + value, mask=live)


def segment_returns(
    rewards: Tensor,
    values: Tensor | None,
    bootstrap: Tensor | None,
    cu: Tensor,
    gamma: float,
    decay: float,
    wide: bool = False,
) -> Tensor:
    """Arguments and results of mmpack::segment_returns."""
    count, segments = len(rewards), len(cu) - 1
    dtype = torch.float64 if wide else torch.float32
    out = rewards.new_empty((1 if values is None else 2, count), dtype=dtype)
    if count == 0:
        return out
    with torch.cuda.device_of(out):
        returns_kernel[(segments,)](
            rewards.contiguous(),
            None if values is None else values.contiguous(),
            None if bootstrap is None else bootstrap.contiguous(),
            cu.contiguous(),
            out,
            count,
            gamma,
            decay,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
