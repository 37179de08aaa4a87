"""mmpack::group_advantages in one launch: each program compares its samples with all of the batch, in float64.

A group's sums run over the batch in its order, so they are the same bits for each of its members.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.tickets import take

ROWS, COLUMNS = 4, 128


@triton.jit
def spread_sum(values, weights, count, centre, SQUARED: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of values [count], or of their squared distances from `centre`; each weights[i] times, or once."""
    total = tl.zeros((COLUMNS,), tl.float64)
    for first in range(0, count, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        value = tl.load(values + at, mask=at < count, other=0, cache_modifier=".cg").to(tl.float64)
        if SQUARED:
            value = tl.where(at < count, (value - centre) * (value - centre), 0.0)
        if weights is not None:
            value *= tl.load(weights + at, mask=at < count, other=0).to(tl.float64)
        total += value
    return tl.sum(total)


@triton.jit
def scaled(centred, variance, eps):
    std = tl.sqrt(variance)
    return tl.where(std == 0, 0.0, centred / (std + eps))


@triton.jit(do_not_specialize=["place", "count"])
def advantages_kernel(
    rewards,
    groups,
    tokens,
    out,
    baselined,
    tickets,
    place,
    count,
    eps: tl.float64,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    group = tl.load(groups + rows, mask=live, other=0)
    reward = tl.load(rewards + rows, mask=live, other=0).to(tl.float64)

    sizes = tl.zeros((ROWS, COLUMNS), tl.float64)
    totals = tl.zeros((ROWS, COLUMNS), tl.float64)
    for first in range(0, count, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        others = tl.load(groups + at, mask=at < count, other=0)
        values = tl.load(rewards + at, mask=at < count, other=0).to(tl.float64)
        same = (group[:, None] == others[None, :]) & (at < count)[None, :]
        sizes += tl.where(same, 1.0, 0.0)
        totals += tl.where(same, values[None, :], 0.0)
    size = tl.maximum(tl.sum(sizes, axis=1), 1.0)
    mean = tl.sum(totals, axis=1) / size
    centred = reward - mean
    others_count = tl.maximum(size - 1, 1.0)

    value = centred
    if KIND == "grpo":
        squares = tl.zeros((ROWS, COLUMNS), tl.float64)
        for first in range(0, count, COLUMNS):
            at = first + tl.arange(0, COLUMNS)
            others = tl.load(groups + at, mask=at < count, other=0)
            values = tl.load(rewards + at, mask=at < count, other=0).to(tl.float64)
            same = (group[:, None] == others[None, :]) & (at < count)[None, :]
            distance = values[None, :] - mean[:, None]
            squares += tl.where(same, distance * distance, 0.0)
        value = scaled(centred, tl.sum(squares, axis=1) / others_count, eps)
    elif KIND == "rloo":
        value = centred * size / others_count
    elif KIND == "lite_ppo":
        middle = spread_sum(rewards, None, count, 0.0, False, COLUMNS) / count
        squared = spread_sum(rewards, None, count, middle, True, COLUMNS)
        value = scaled(centred, squared / tl.maximum(count - 1, 1), eps)

    if KIND != "reinforce_pp":
        tl.store(out + rows, value, mask=live)
    else:
        tl.store(baselined + rows, tl.where(size > 1, centred, reward), mask=live)
        tl.debug_barrier()
        arrived = tl.atomic_add(tickets + place, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:  # the last has all of the batch before it
            total = count.to(tl.float64)
            if tokens is not None:
                total = spread_sum(tokens, None, count, 0.0, False, COLUMNS)
            middle = spread_sum(baselined, tokens, count, 0.0, False, COLUMNS)
            middle = middle / tl.maximum(total, 1.0)
            squared = spread_sum(baselined, tokens, count, middle, True, COLUMNS)
            variance = squared / tl.maximum(total - 1, 1.0)
            for first in range(0, count, COLUMNS):
                at = first + tl.arange(0, COLUMNS)
                one = tl.load(baselined + at, mask=at < count, other=0, cache_modifier=".cg")
                tl.store(out + at, scaled(one - middle, variance, eps), mask=at < count)
            tl.store(tickets + place, 0)


def group_advantages(
    rewards: Tensor, group_index: Tensor, tokens: Tensor | None, kind: str, eps: float
) -> Tensor:
    """Arguments and results of mmpack::group_advantages."""
    count = len(rewards)
    out = rewards.new_empty(count, dtype=torch.float32)
    if count == 0:
        return out
    whole_batch = kind == "reinforce_pp"
    with torch.cuda.device_of(rewards):
        tickets, place = take(rewards.device) if whole_batch else (None, 0)
        advantages_kernel[(triton.cdiv(count, ROWS),)](
            rewards.contiguous(),
            group_index.contiguous(),
            None if tokens is None else tokens.contiguous(),
            out,
            rewards.new_empty(count, dtype=torch.float64) if whole_batch else None,
            tickets,
            place,
            count,
            eps,
            KIND=kind,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
    return out
