"""The divergence from a teacher in one launch: a program per loss token walks its list, in float64.

Sums are taken by lanes, which depend on the list alone: the bits of a token are the same in any batch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.losses.distillation.call import LEAST_REST, Columns, Options
from mmpack.ops.logprobs.lists.list_kernels import list_of

LANES = 64  # entries of a list at a time


def divergence(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Divergences [N] and masses [2, N] (policy, teacher), float64; derivatives [M] of a token's own divergence."""
    logprobs, count = columns.logprobs.contiguous(), len(columns.offsets) - 1
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    values = torch.empty(count, dtype=torch.float64, device=logprobs.device)
    masses = torch.empty(2, count, dtype=torch.float64, device=logprobs.device)
    slopes = torch.zeros(len(logprobs), dtype=dtype, device=logprobs.device)
    if count:
        with torch.cuda.device_of(logprobs):
            divergence_kernel[(count,)](
                logprobs,
                columns.teacher.contiguous(),
                columns.offsets,
                values,
                masses,
                slopes,
                count,
                len(logprobs),
                options.least,
                LEAST_REST,
                options.beta,
                math.log(options.beta),
                math.log1p(-options.beta),
                KIND=options.kind,
                TAIL=options.tail,
                LANES=LANES,
                num_warps=1,
            )
    return values, masses, slopes


@triton.jit
def read(column, at, inside):
    """Float64; -inf beyond the list, a probability of 0."""
    return tl.load(column + at, mask=inside, other=-float("inf")).to(tl.float64)


@triton.jit
def times(p, x):
    """p · x, and 0 where p is 0, whatever x is."""
    return tl.where(p == 0, 0.0, p * x)


@triton.jit
def pointwise(a, b, beta, log_beta, log_rest, KIND: tl.constexpr):
    """The term of an id with log-probabilities a (policy) and b (teacher), and its derivative to a."""
    p, q = tl.exp(a), tl.exp(b)
    if KIND == "forward_kl":
        value, slope = times(q, b - a), -q
    elif KIND == "reverse_kl":
        value = times(p, a - b)
        slope = value + p
    else:
        x, y = a + log_rest, b + log_beta
        top = tl.maximum(x, y)
        middle = top + tl.log(tl.exp(x - top) + tl.exp(y - top))
        slope = (1 - beta) * times(p, a - middle)
        value = slope + beta * times(q, b - middle)
    return value, slope


@triton.jit(do_not_specialize=["count", "num_entries"])
def divergence_kernel(
    logprobs,
    teacher,
    offsets,
    values,
    masses,
    slopes,
    count,
    num_entries,
    least: tl.float64,
    least_rest: tl.float64,
    beta: tl.float64,
    log_beta: tl.float64,
    log_rest: tl.float64,
    KIND: tl.constexpr,
    TAIL: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0)
    first, last = list_of(offsets, token, num_entries)
    lanes = tl.arange(0, LANES)
    mass = tl.zeros((LANES,), tl.float64)
    mass_teacher = tl.zeros((LANES,), tl.float64)
    kept = tl.zeros((LANES,), tl.float64)  # the same with the least logprob
    kept_teacher = tl.zeros((LANES,), tl.float64)
    peak = tl.full((LANES,), -float("inf"), tl.float64)
    peak_teacher = tl.full((LANES,), -float("inf"), tl.float64)
    for start in range(first, last, LANES):
        inside = start + lanes < last
        a, b = read(logprobs, start + lanes, inside), read(teacher, start + lanes, inside)
        mass += tl.exp(a)
        mass_teacher += tl.exp(b)
        a = tl.where(inside & (a < least), least, a)
        b = tl.where(inside & (b < least), least, b)
        kept += tl.exp(a)
        kept_teacher += tl.exp(b)
        peak = tl.maximum(peak, a)
        peak_teacher = tl.maximum(peak_teacher, b)
    tl.store(masses + token, tl.sum(mass, 0))
    tl.store(masses + count + token, tl.sum(mass_teacher, 0))

    shift = tl.zeros((), tl.float64)
    shift_teacher = tl.zeros((), tl.float64)
    if TAIL == "renormalize":
        top, top_teacher = tl.max(peak, 0), tl.max(peak_teacher, 0)
        total = tl.zeros((LANES,), tl.float64)
        total_teacher = tl.zeros((LANES,), tl.float64)
        for start in range(first, last, LANES):
            inside = start + lanes < last
            a, b = read(logprobs, start + lanes, inside), read(teacher, start + lanes, inside)
            a = tl.where(inside & (a < least), least, a)
            b = tl.where(inside & (b < least), least, b)
            total += tl.exp(a - top)
            total_teacher += tl.exp(b - top_teacher)
        shift = top + tl.log(tl.sum(total, 0))
        shift_teacher = top_teacher + tl.log(tl.sum(total_teacher, 0))

    value = tl.zeros((LANES,), tl.float64)
    along = tl.zeros((LANES,), tl.float64)
    for start in range(first, last, LANES):
        inside = start + lanes < last
        a, b = read(logprobs, start + lanes, inside), read(teacher, start + lanes, inside)
        a = tl.where(inside & (a < least), least, a) - shift
        b = tl.where(inside & (b < least), least, b) - shift_teacher
        term, slope = pointwise(a, b, beta, log_beta, log_rest, KIND)
        value += tl.where(inside, term, 0.0)
        along += tl.where(inside, slope, 0.0)
    total_value = tl.sum(value, 0)
    back = tl.zeros((), tl.float64)  # what an id's probability takes from its slope
    if TAIL == "renormalize":
        back = tl.sum(along, 0)
    if TAIL == "bucket":
        rest = 1 - tl.sum(kept, 0)
        rest_teacher = 1 - tl.sum(kept_teacher, 0)
        floored = rest <= least_rest
        rest = tl.where(floored, least_rest, rest)
        rest_teacher = tl.where(rest_teacher <= least_rest, least_rest, rest_teacher)
        a_rest, b_rest = tl.log(rest), tl.log(rest_teacher)
        of_rest, slope_rest = pointwise(a_rest, b_rest, beta, log_beta, log_rest, KIND)
        total_value += tl.where(last > first, of_rest, 0.0)
        back = tl.where(floored, 0.0, slope_rest / rest)
    tl.store(values + token, total_value)

    for start in range(first, last, LANES):
        inside = start + lanes < last
        raw, b = read(logprobs, start + lanes, inside), read(teacher, start + lanes, inside)
        a = tl.where(inside & (raw < least), least, raw) - shift
        b = tl.where(inside & (b < least), least, b) - shift_teacher
        _, slope = pointwise(a, b, beta, log_beta, log_rest, KIND)
        if TAIL != "ignore":
            slope -= tl.exp(a) * back
        slope = tl.where(raw < least, 0.0, slope)
        tl.store(slopes + start + lanes, slope.to(slopes.dtype.element_ty), mask=inside)
