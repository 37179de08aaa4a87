"""mmpack::policy_loss in one launch: a program for each sample and part of it, sums in float64, no atomics in values.

Every program of a sample sums what the ratio or the correction needs of the whole sample, then does its own tokens.
The program that finishes last adds up what all of them left behind, in the order of their numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.losses.kl import LOG_RATIO_BOUND as BOUND
from mmpack.losses.policy.call import Columns, Options, outputs_of
from mmpack.losses.policy.variants import SURROGATES
from mmpack.ops.tickets import take

BLOCK = 256
PROGRAMS = 512  # aimed at where samples are few and long
SUMS = 10  # loss, ratio, clipped, kl_old, squared weight, correction, cut, kl_ref, entropy, dual: METRICS but for two
LOG_RATIO_BOUND = tl.constexpr(BOUND)


@triton.jit
def read(column, at, mask):
    return tl.load(column + at, mask=mask, other=0).to(tl.float64)


@triton.jit
def gap_sum(left, right, start, stop, BLOCK: tl.constexpr):
    """Sum of left - right over a sample: the same bits in every program and batch."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += read(left, at, at < stop) - read(right, at, at < stop)
    return tl.sum(total)


@triton.jit
def clamp(x, low, high):
    """A NaN stays one."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def clipped_sum(left, right, low, high, start, stop, BLOCK: tl.constexpr):
    """`gap_sum` of differences within [low, high]."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += clamp(read(left, at, at < stop) - read(right, at, at < stop), low, high)
    return tl.sum(total)


@triton.jit
def k3_of_minus(d):
    """exp(d) - 1 - d, by its series where the difference would cancel."""
    near = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    far = tl.exp(clamp(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - 1 - d
    return tl.where(tl.abs(d) < 0.01, near, far)


@triton.jit(do_not_specialize=["place", "count", "num_samples", "parts"])
def policy_loss_kernel(
    logprobs,
    entropy,
    advantages,
    cu_loss,
    old_logprobs,
    ref_logprobs,
    rollout_logprobs,
    total,
    loss,
    metrics,
    derivatives,
    partials,
    tickets,
    place,
    count,
    num_samples,
    parts,
    scale: tl.float64,
    ratio_low: tl.float64,
    ratio_high: tl.float64,
    dual_clip: tl.float64,
    kl_coef: tl.float64,
    entropy_coef: tl.float64,
    correction_low: tl.float64,
    correction_high: tl.float64,
    SAMPLE_MEAN: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
    KIND: tl.constexpr,
    KL_KIND: tl.constexpr,
    KL_TERM: tl.constexpr,
    ENTROPY_TERM: tl.constexpr,
    CORRECTION: tl.constexpr,
    LEVEL: tl.constexpr,
    DUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    MERGE: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    sample, part = program // parts, program % parts
    start = tl.load(cu_loss + sample, mask=sample < num_samples, other=0).to(tl.int32)
    stop = tl.load(cu_loss + sample + 1, mask=sample < num_samples, other=0).to(tl.int32)
    length = tl.maximum(stop - start, 1).to(tl.float64)

    factor = scale
    if total is not None:
        whole = tl.load(total).to(tl.float64)
        factor = scale / tl.where(whole < 1, 1.0, whole)
    weight = factor
    share = length * 0 + 1
    if SAMPLE_MEAN:
        share = 1 / length
        weight = factor / length

    sample_ratio = length * 0
    if KIND == "gspo" and old_logprobs is not None:
        sample_ratio = gap_sum(logprobs, old_logprobs, start, stop, BLOCK) / length
    if KIND == "gmpo" and old_logprobs is not None:
        own = tl.load(advantages + sample, mask=sample < num_samples, other=0).to(tl.float64)
        # only what lowers the gain is cut
        least = tl.where(own < 0, ratio_low, -float("inf"))
        most = tl.where(own > 0, ratio_high, float("inf"))
        sample_ratio = clipped_sum(logprobs, old_logprobs, least, most, start, stop, BLOCK) / length
    sample_gap = length * 0
    if CORRECTION is not None and LEVEL != "token":
        earlier = logprobs if old_logprobs is None else old_logprobs
        sample_gap = gap_sum(earlier, rollout_logprobs, start, stop, BLOCK)
        if LEVEL == "geometric":
            sample_gap = sample_gap / length

    zeros = tl.zeros((BLOCK,), tl.float64)
    terms, ratios, clips, kls_old, squares = zeros, zeros, zeros, zeros, zeros
    corrections, cuts, kls_ref, entropies, duals = zeros, zeros, zeros, zeros, zeros
    for first in range(start + part * BLOCK, stop, parts * BLOCK):
        at = first + tl.arange(0, BLOCK)
        live = at < stop
        lp = read(logprobs, at, live)
        old = lp if old_logprobs is None else read(old_logprobs, at, live)
        advantage = read(advantages, at * 0 + sample if BY_SAMPLE else at, live)

        log_ratio = lp - old
        exponent = log_ratio
        if KIND == "gspo" or KIND == "gmpo":
            exponent = zeros + sample_ratio
            if old_logprobs is None:
                exponent += log_ratio  # 0, or the NaN of a logprob
        ratio = tl.exp(clamp(exponent, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        within = clamp(ratio, ratio_low, ratio_high)
        if KIND == "cispo":
            clipped = (ratio < ratio_low) | (ratio > ratio_high)
            slope = -within * advantage
            term = slope * lp
        else:
            bounded = log_ratio if KIND == "gmpo" else ratio
            clipped = ((bounded < ratio_low) & (advantage < 0)) | (
                (bounded > ratio_high) & (advantage > 0)
            )
            if KIND == "gmpo":
                within = ratio  # clipped by token, before the mean
            term = -tl.where(clipped, within, ratio) * advantage
            moves = (tl.abs(exponent) <= LOG_RATIO_BOUND) & (clipped == 0)
            if DUAL:
                cut_again = (ratio > dual_clip) & (advantage < 0)
                term = tl.where(cut_again, -dual_clip * advantage, term)
                moves = moves & (cut_again == 0)
                duals += tl.where(live & cut_again, 1.0, 0.0)
            slope = tl.where(moves, term, 0.0)

        importance = ratio
        if CORRECTION is not None:
            gap = zeros + sample_gap
            if LEVEL == "token":
                gap = old - read(rollout_logprobs, at, live)
            bare = tl.exp(clamp(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
            outside = (bare < correction_low) | (bare > correction_high)
            if CORRECTION == "tis":
                importance = clamp(bare, correction_low, correction_high)
            else:
                importance = tl.where(outside, 0.0, bare)
            term = term * importance
            slope = slope * importance
            corrections += tl.where(live, importance, 0.0)
            cuts += tl.where(live & outside, 1.0, 0.0)
        if ref_logprobs is not None:
            d = lp - read(ref_logprobs, at, live)
            if KL_KIND == "k1":
                kl = d
            elif KL_KIND == "k2":
                kl = d * d / 2
            else:
                kl = k3_of_minus(-d)
            kls_ref += tl.where(live, kl, 0.0)
            if KL_TERM:
                term += kl_coef * kl
                slope += kl_coef * d
        if entropy is not None:
            uncertainty = read(entropy, at, live)
            entropies += uncertainty
            if ENTROPY_TERM:
                term -= entropy_coef * uncertainty
                tl.store(derivatives + count + at, zeros - entropy_coef * weight, mask=live)
        tl.store(derivatives + at, weight * slope, mask=live)

        terms += tl.where(live, term, 0.0)
        ratios += tl.where(live, ratio, 0.0)
        clips += tl.where(live & clipped, 1.0, 0.0)
        kls_old += tl.where(live, k3_of_minus(log_ratio), 0.0)
        squares += tl.where(live, importance * importance, 0.0)

    mine = partials + program
    tl.store(mine, tl.sum(terms) * share)
    tl.store(mine + programs, tl.sum(ratios))
    tl.store(mine + 2 * programs, tl.sum(clips))
    tl.store(mine + 3 * programs, tl.sum(kls_old))
    tl.store(mine + 4 * programs, tl.sum(squares))
    tl.store(mine + 5 * programs, tl.sum(corrections))
    tl.store(mine + 6 * programs, tl.sum(cuts))
    tl.store(mine + 7 * programs, tl.sum(kls_ref))
    tl.store(mine + 8 * programs, tl.sum(entropies))
    tl.store(mine + 9 * programs, tl.sum(duals))
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets + place, 1, sem="acq_rel")
    if arrived == programs - 1:
        slot = tl.arange(0, SLOTS)
        merged = tl.zeros((SLOTS, MERGE), tl.float64)
        for first in range(0, programs, MERGE):
            at = first + tl.arange(0, MERGE)
            there = (slot < 10)[:, None] & (at < programs)[None, :]
            merged += tl.load(
                partials + slot[:, None] * programs + at[None, :],
                mask=there,
                other=0.0,
                cache_modifier=".cg",
            )
        sums = tl.sum(merged, axis=1)
        tokens = tl.maximum(count, 1).to(tl.float64)
        first_power = tl.sum(tl.where(slot == (1 if CORRECTION is None else 5), sums, 0.0))
        second_power = tl.sum(tl.where(slot == 4, sums, 0.0))
        alike = first_power * first_power / tl.where(second_power == 0, 1.0, second_power * tokens)
        value = tl.where(slot == 0, count.to(tl.float64), sums / tokens)
        value = tl.where(slot == 4, alike, value)
        tl.store(metrics + slot, value, mask=slot < 10)
        tl.store(loss, tl.sum(tl.where(slot == 0, sums, 0.0)) * factor)
        tl.store(tickets + place, 0)


def policy_loss(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], METRICS [10] and the derivatives [1 or 2, N] of mmpack::policy_loss."""
    logprobs, count, num_samples = columns.logprobs, len(columns.logprobs), len(columns.cu_loss) - 1
    corrected = options.correction is not None
    whole = SURROGATES[options.surrogate].of_sample
    whole = whole or (corrected and options.correction_level != "token")
    parts = parts_of(count, num_samples, whole)
    programs = max(num_samples * parts, 1)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    derivatives = logprobs.new_empty((outputs_of(options), count), dtype=dtype)
    metrics = logprobs.new_empty(SUMS, dtype=torch.float32)
    loss = logprobs.new_empty((), dtype=torch.float32)
    partials = logprobs.new_empty((SUMS, programs), dtype=torch.float64)
    if not corrected:
        columns = columns._replace(rollout_logprobs=None)
    with torch.cuda.device_of(logprobs):
        tickets, place = take(logprobs.device)
        policy_loss_kernel[(programs,)](
            *(None if x is None else x.contiguous() for x in columns),
            loss,
            metrics,
            derivatives,
            partials,
            tickets,
            place,
            count,
            num_samples,
            parts,
            options.scale,
            options.ratio_low,
            options.ratio_high,
            options.dual_clip,
            options.kl_coef,
            options.entropy_coef,
            options.correction_low,
            options.correction_high,
            **variant(options, len(columns.advantages) == num_samples),
            MERGE=64 if programs <= PROGRAMS else 256,
            num_warps=4,
        )
    return loss, metrics, derivatives


def variant(options: Options, by_sample: bool) -> dict[str, Any]:
    """What the kernel is compiled for; names that don't matter are left at one value."""
    return {
        "SAMPLE_MEAN": options.sample_mean,
        "BY_SAMPLE": by_sample,
        "KIND": options.surrogate,
        "KL_KIND": options.kl_kind,
        "KL_TERM": options.kl_coef != 0,
        "ENTROPY_TERM": options.entropy_coef != 0,
        "CORRECTION": options.correction,
        "LEVEL": options.correction_level,
        "DUAL": options.dual_clip < math.inf,
        "BLOCK": BLOCK,
        "SLOTS": 16,
    }


def parts_of(count: int, num_samples: int, whole: bool) -> int:
    """Programs for each sample, by what is known on the host: the mean length; few where each sums the whole sample."""
    samples = max(num_samples, 1)
    parts = min(triton.cdiv(count, samples * BLOCK), PROGRAMS // samples, 8 if whole else PROGRAMS)
    return max(parts, 1)
