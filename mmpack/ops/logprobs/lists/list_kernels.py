"""Triton kernels with one program per loss token, which walks the token's list of entries: they read and write [M].

Entries' logits are float32 and before the temperature; what a token has once is computed in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf minus itself is NaN
_NEGLIGIBLE = tl.constexpr(-1e30)  # stands for -inf where it is multiplied with a probability of 0
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def list_of(starts, token, num_entries):
    """First and last entry of a token's list, within [0, M]."""
    first = tl.maximum(tl.load(starts + token).to(tl.int64), 0)
    last = tl.minimum(tl.load(starts + token + 1).to(tl.int64), num_entries)
    return first, last


# Counts differ from batch to batch: no kernel of their own for those that 16 divides.
@triton.jit(do_not_specialize=["count", "num_entries"])
def statistics_kernel(
    entry_logits,
    ids,
    starts,
    targets,
    temperature,
    logprobs,
    entropies,
    maximum,
    log_total,
    count,
    num_entries,
    ENTROPY: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0)
    first, last = list_of(starts, token, num_entries)
    target = tl.load(targets + token).to(tl.int64)
    lanes = tl.arange(0, LANES)
    peak = tl.full((LANES,), _LOWEST, tl.float32)
    chosen = tl.zeros((LANES,), tl.float32)
    hits = tl.zeros((LANES,), tl.int32)
    falls = tl.zeros((LANES,), tl.int32)
    for start in range(first, last, LANES):
        at = start + lanes
        inside = at < last
        entry = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
        before = tl.load(ids + at - 1, mask=inside & (at > first), other=-1).to(tl.int64)
        z = tl.load(entry_logits + at, mask=inside, other=_LOWEST)
        hit = inside & (entry == target)
        peak = tl.maximum(peak, z)
        chosen += tl.where(hit, z, 0.0)
        hits += hit.to(tl.int32)
        falls += (inside & (entry <= before) & (at > first)).to(tl.int32)
    top = tl.max(peak, 0)
    exact = tl.load(temperature)  # float64
    scale = _LOG2_E / exact.to(tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    for start in range(first, last, LANES):
        at = start + lanes
        z = tl.load(entry_logits + at, mask=at < last, other=-float("inf"))
        difference = z - top
        p = tl.exp2(difference * scale)
        total += p
        if ENTROPY:
            weighted += p * tl.maximum(difference, _NEGLIGIBLE)
    row_total = tl.sum(total, 0)
    row_log = tl.log(row_total.to(tl.float64))
    logprob = (tl.sum(chosen, 0).to(tl.float64) - top.to(tl.float64)) / exact - row_log
    sound = (tl.sum(hits, 0) == 1) & (tl.sum(falls, 0) == 0)
    # A batch whose offsets don't fit its ids has no value anywhere.
    sound &= (tl.load(starts) == 0) & (tl.load(starts + count) == num_entries)
    tl.store(logprobs + token, tl.where(sound, logprob, float("nan")).to(tl.float32))
    tl.store(maximum + token, top.to(tl.float64))
    tl.store(log_total + token, row_log)
    if ENTROPY:
        mean = tl.sum(weighted, 0) / row_total
        entropy = row_log - mean.to(tl.float64) / exact
        tl.store(entropies + token, tl.where(sound, entropy, float("nan")))


@triton.jit(do_not_specialize=["num_entries"])
def slopes_kernel(
    entry_logits,
    ids,
    starts,
    targets,
    temperature,
    grad_logprobs,
    grad_entropies,
    logprobs,
    entropies,
    maximum,
    log_total,
    out,
    num_entries,
    softcap,
    SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0)
    first, last = list_of(starts, token, num_entries)
    g = tl.load(grad_logprobs + token).to(tl.float64)
    u = tl.zeros((), tl.float64)
    row_entropy = tl.zeros((), tl.float64)
    if grad_entropies is not None:
        u = tl.load(grad_entropies + token).to(tl.float64)
        row_entropy = tl.load(entropies + token)
    if (g == 0) & (u == 0):
        return  # `out` holds zeros
    target = tl.load(targets + token).to(tl.int64)
    exact = tl.load(temperature)
    top, row_log = tl.load(maximum + token), tl.load(log_total + token)
    lost = tl.load(logprobs + token)
    lost = lost != lost
    for start in range(first, last, LANES):
        at = start + tl.arange(0, LANES)
        inside = at < last
        z = tl.load(entry_logits + at, mask=inside, other=0.0).to(tl.float64)
        entry = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
        logp = (z - top) / exact - row_log
        p = tl.exp(logp)
        slope = (tl.where(entry == target, 1.0, 0.0) - p) * g
        if grad_entropies is not None:
            slope -= p * (tl.maximum(logp, _NEGLIGIBLE) + row_entropy) * u
        slope /= exact
        if SOFTCAP:
            slope *= 1.0 - (z / softcap) * (z / softcap)
        slope = tl.where(lost, float("nan"), slope)
        tl.store(out + at, slope.to(tl.float32), mask=inside)


@triton.jit(
    do_not_specialize=["count", "num_entries", "first_token", "first_column", "num_columns"]
)
def window_kernel(
    block,
    block_stride,
    values,
    ids,
    starts,
    count,
    num_entries,
    first_token,
    first_column,
    num_columns,
    PUT: tl.constexpr,
    LANES: tl.constexpr,
):
    """values[m] = block[row, column] for the entries of a row's token in these columns; with PUT the other way."""
    row = tl.program_id(0)
    token = first_token + row
    if token >= count:
        return
    first, last = list_of(starts, token, num_entries)
    base = block + row.to(tl.int64) * block_stride
    for start in range(first, last, LANES):
        at = start + tl.arange(0, LANES)
        column = tl.load(ids + at, mask=at < last, other=-1).to(tl.int64) - first_column
        inside = (at < last) & (column >= 0) & (column < num_columns)
        if PUT:
            value = tl.load(values + at, mask=inside, other=0.0)
            tl.store(base + column, value.to(block.dtype.element_ty), mask=inside)
        else:
            value = tl.load(base + column, mask=inside, other=0.0)
            tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)
