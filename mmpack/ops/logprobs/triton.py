"""selected_logprobs in Triton: forward, one program reads a row once; backward, one program per block of columns.

The forward reads a row in tiles [DEPTH, LANES], by columns. Each lane keeps a maximum and a sum of its own, so nothing
crosses threads before the row ends, and each logit costs one exp and 1/DEPTH more. Orders of summation depend only on
V, dtype and alignment.
A pointer is None for what a call does without; the kernel is compiled separately for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.call import Call, Statistics

LANES = 1024  # 16 bytes of bf16 per thread
DEPTH = 4
WARPS = 2 if torch.version.hip else 4  # of 64 or 32 threads: LANES must span them all
BLOCK = 4096  # columns of one program of the backward
BLOCK_WARPS = 4
TOKENS = 32  # of one row at a time, where rows repeat

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf minus itself is NaN
_NEGLIGIBLE = tl.constexpr(-1e30)  # stands for -inf where it is multiplied with a probability of 0
_LOG2_E = tl.constexpr(1.4426950408889634)


def forward(call: Call) -> Statistics:
    """Statistics in float32."""
    logits, count, slots = call.logits, len(call.targets), _count_groups(call)
    logprobs, maximum, log_total = (
        torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    entropies = logprobs.new_empty(count if call.entropy else 0)
    if slots and count:
        with torch.cuda.device_of(logits):
            forward_kernel[(slots,)](
                logits,
                *logits.stride(),
                logits.shape[1],
                call.targets,
                *call.groups,
                call.temperature,
                logprobs,
                entropies if call.entropy else None,
                maximum,
                log_total,
                LANES=LANES,
                DEPTH=DEPTH,
                TOKENS=TOKENS if call.order is not None else 1,
                num_warps=WARPS,
            )
    return Statistics(logprobs, entropies, maximum, log_total)


def backward(given: Incoming, call: Call, statistics: Statistics) -> Tensor:
    """Gradient to the logits: dense [T, V], in place of the logits, or compact [S, V] by group."""
    logits, compact = call.logits, call.gradient == "compact"
    with torch.cuda.device_of(logits):
        out = logits
        if call.gradient != "inplace":
            out = logits.new_empty(
                _count_groups(call) if compact else call.num_rows, logits.shape[1]
            )
        parts = triton.cdiv(logits.shape[1], BLOCK)
        if len(out):
            backward_kernel[(len(out) * parts,)](
                out,
                *out.stride(),
                logits,
                *logits.stride(),
                logits.shape[1],
                call.targets,
                call.rows if compact else None,
                None if compact else _group_of_row(call),
                call.order,
                call.offsets,
                given.grad_logprobs.contiguous(),
                None if given.grad_entropies is None else given.grad_entropies.contiguous(),
                *statistics,
                call.temperature,
                parts,
                BLOCK=BLOCK,
                TOKENS=TOKENS if call.order is not None else 1,
                num_warps=BLOCK_WARPS,
            )
    return out


def _count_groups(call: Call) -> int:
    """S: without rows, one group per loss token and row."""
    return len(call.targets) if call.rows is None else len(call.rows)


def _group_of_row(call: Call) -> Tensor | None:
    """[T + 1] int32, -1 for rows that no loss token reads; None where row n has group n."""
    if call.rows is None:
        return None
    found = torch.full((call.num_rows + 1,), -1, dtype=torch.int32, device=call.rows.device)
    groups = torch.arange(len(call.rows), dtype=torch.int32, device=call.rows.device)
    # Empty groups have row T.
    return found.index_copy_(0, call.rows.long(), groups)


@triton.jit
def _fold(x, peak, total, weighted, scale, ENTROPY: tl.constexpr):
    """A tile [DEPTH, LANES] into each lane's maximum, sum of exp and, for the entropy, sum of exp · difference."""
    new = tl.maximum(peak, tl.max(x, 0))
    change = tl.maximum(peak - new, _NEGLIGIBLE)
    shrink = tl.exp2(change * scale)
    difference = x - new[None, :]
    weight = tl.exp2(difference * scale)
    if ENTROPY:
        terms = tl.sum(weight * tl.maximum(difference, _NEGLIGIBLE), 0)
        weighted = (weighted + total * change) * shrink + terms
    total = total * shrink + tl.sum(weight, 0)
    return new, total, weighted


@triton.jit
def forward_kernel(
    logits,
    row_stride,
    column_stride,
    vocab,
    targets,
    rows,
    order,
    offsets,
    temperature,
    logprobs,
    entropies,
    maximum,
    log_total,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    slot = tl.program_id(0)
    row = slot.to(tl.int64)
    first, last = slot.to(tl.int64), slot.to(tl.int64) + 1
    if order is not None:
        first, last = tl.load(offsets + slot), tl.load(offsets + slot + 1)
        if first == last:
            return
    if rows is not None:
        row = tl.load(rows + slot).to(tl.int64)
    base = logits + row * row_stride

    exact = tl.load(temperature)  # float64
    scale = _LOG2_E / exact.to(tl.float32)
    TILE: tl.constexpr = DEPTH * LANES
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    columns = columns.to(tl.int64)
    peak = tl.full((LANES,), _LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    whole = vocab // TILE * TILE
    for start in range(0, whole, TILE):
        x = tl.load(base + (start + columns) * column_stride, eviction_policy="evict_first")
        peak, total, weighted = _fold(
            x.to(tl.float32), peak, total, weighted, scale, entropies is not None
        )
    if whole < vocab:
        inside = whole + columns < vocab
        x = tl.load(base + (whole + columns) * column_stride, mask=inside, other=-float("inf"))
        peak, total, weighted = _fold(
            x.to(tl.float32), peak, total, weighted, scale, entropies is not None
        )

    top = tl.max(peak, 0)
    change = tl.maximum(peak - top, _NEGLIGIBLE)
    shrink = tl.exp2(change * scale)
    row_total = tl.sum(total * shrink, 0)
    row_log = tl.log(row_total.to(tl.float64))
    if entropies is not None:
        row_weighted = tl.sum((weighted + total * change) * shrink, 0)
        row_entropy = row_log.to(tl.float32) - row_weighted / row_total / exact.to(tl.float32)

    for start in range(first, last, TOKENS):
        token, inside = _tokens(start, last, order, TOKENS)
        target = tl.load(targets + token, mask=inside, other=0).to(tl.int64)
        known = inside & (target >= 0) & (target < vocab)
        z = tl.load(base + target * column_stride, mask=known, other=float("nan"))
        # One rounding: differences of logits of 1e4 are taken before anything else.
        shifted = (z.to(tl.float64) - top.to(tl.float64)) / exact
        tl.store(logprobs + token, (shifted - row_log).to(tl.float32), mask=inside)
        same = tl.zeros((TOKENS,), tl.float32)
        tl.store(maximum + token, same + top, mask=inside)
        tl.store(log_total + token, same + row_log.to(tl.float32), mask=inside)
        if entropies is not None:
            tl.store(entropies + token, same + row_entropy, mask=inside)


@triton.jit
def _target_gradient(
    own, sum_logprob, sum_entropy, logprob, entropy, temperature, ENTROPY: tl.constexpr
):
    """Gradient to a target's logit, float64. -expm1(logp) · g keeps its digits as p nears 1: logp is 0 or >= 6e-8."""
    logprob = logprob.to(tl.float64)
    p = tl.exp(logprob)
    grad = (own - sum_logprob) - (p - 1) * sum_logprob
    if ENTROPY:
        finite = tl.maximum(logprob, _NEGLIGIBLE)
        grad -= p * (finite + entropy.to(tl.float64)) * sum_entropy
    return grad / temperature


@triton.jit
def _tokens(start, last, order, TOKENS: tl.constexpr):
    """Loss tokens of a row from the `start`-th on, and which of them there are."""
    at = start + tl.arange(0, TOKENS)
    token = at
    if order is not None:
        token = tl.load(order + at, mask=at < last, other=0)
    return token, at < last


@triton.jit
def _sum_of_target(wanted, first, last, order, targets, grad_logprobs, TOKENS: tl.constexpr):
    """For each target of `wanted` the gradients of all loss tokens of its row that have it, in the order of n."""
    own = tl.zeros((TOKENS,), tl.float64)
    for start in range(first, last, TOKENS):
        token, inside = _tokens(start, last, order, TOKENS)
        target = tl.load(targets + token, mask=inside, other=-1).to(tl.int64)
        g = tl.load(grad_logprobs + token, mask=inside, other=0.0).to(tl.float64)
        own += tl.sum(tl.where(wanted[:, None] == target[None, :], g[None, :], 0.0), 1)
    return own


@triton.jit
def backward_kernel(
    out,
    out_row_stride,
    out_column_stride,
    logits,
    row_stride,
    column_stride,
    vocab,
    targets,
    rows,
    slot_of_row,
    order,
    offsets,
    grad_logprobs,
    grad_entropies,
    logprobs,
    entropies,
    maximum,
    log_total,
    temperature,
    parts,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    ENTROPY: tl.constexpr = grad_entropies is not None
    place = (tl.program_id(0) // parts).to(tl.int64)
    begin = tl.program_id(0) % parts * BLOCK
    slot = place
    row = place
    if slot_of_row is not None:
        slot = tl.load(slot_of_row + place).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + slot).to(tl.int64)
    first = slot
    last = tl.where(slot < 0, slot, slot + 1)
    if order is not None:
        first = tl.load(offsets + slot, mask=slot >= 0, other=0)
        last = tl.load(offsets + slot + 1, mask=slot >= 0, other=0)

    # The row's gradients, summed in the order of n.
    sum_logprob = tl.full((), 0.0, tl.float64)
    sum_entropy = tl.full((), 0.0, tl.float64)
    live = tl.full((), 0, tl.int32)
    for start in range(first, last, TOKENS):
        token, inside = _tokens(start, last, order, TOKENS)
        g = tl.load(grad_logprobs + token, mask=inside, other=0.0).to(tl.float64)
        sum_logprob += tl.sum(g, 0)
        live |= tl.max((g != 0).to(tl.int32), 0)
        if ENTROPY:
            g = tl.load(grad_entropies + token, mask=inside, other=0.0).to(tl.float64)
            sum_entropy += tl.sum(g, 0)
            live |= tl.max((g != 0).to(tl.int32), 0)

    columns = begin + tl.arange(0, BLOCK).to(tl.int64)
    to = out + place * out_row_stride
    if live == 0:
        zero = tl.zeros((BLOCK,), out.dtype.element_ty)
        tl.store(to + columns * out_column_stride, zero, mask=columns < vocab)
        return

    one = first  # all loss tokens of a row know its statistics
    if order is not None:
        one = tl.load(order + first)
    exact = tl.load(temperature)  # float64
    divisor = exact.to(tl.float32)
    peak = tl.load(maximum + one)
    row_log = tl.load(log_total + one)
    row_entropy = tl.zeros((), tl.float32)
    if ENTROPY:
        row_entropy = tl.load(entropies + one)
    inverse = 1.0 / divisor
    scale = _LOG2_E * inverse
    along = -sum_logprob.to(tl.float32) / divisor
    along_entropy = -sum_entropy.to(tl.float32) / divisor
    x = tl.load(
        logits + row * row_stride + columns * column_stride,
        mask=columns < vocab,
        other=0.0,
        eviction_policy="evict_first",
    )
    difference = x.to(tl.float32) - peak
    p = tl.exp2(difference * scale - row_log * _LOG2_E)
    if ENTROPY:
        logprob = tl.maximum(difference * inverse - row_log, _NEGLIGIBLE)
        grad = p * (along + along_entropy * (logprob + row_entropy))
    else:
        grad = p * along
    tl.store(to + columns * out_column_stride, grad, mask=columns < vocab)

    for start in range(first, last, TOKENS):
        token, known = _tokens(start, last, order, TOKENS)
        target = tl.load(targets + token, mask=known, other=-1).to(tl.int64)
        here = (target >= begin) & (target < tl.minimum(begin + BLOCK, vocab))
        if tl.max(here.to(tl.int32), 0) > 0:
            own = _sum_of_target(target, first, last, order, targets, grad_logprobs, TOKENS)
            logp = tl.load(logprobs + token, mask=known, other=0.0)
            at_target = _target_gradient(
                own, sum_logprob, sum_entropy, logp, row_entropy, exact, ENTROPY
            )
            tl.debug_barrier()  # other threads wrote the targets' columns
            tl.store(to + target * out_column_stride, at_target.to(tl.float32), mask=here)
