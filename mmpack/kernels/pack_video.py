"""Frames to rows of patches and back: one launch each, one read and one write of each value.

A program has the patches of one token and goes through their frames and channels, a pixel or two of a patch a thread.
Normalised values are rounded after each step, as PyTorch rounds them: subtraction, then IEEE
division, or three steps that give its bits (Markstein 1990) where that was checked for all values of a byte.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.families import Family
from mmpack.video.patches import merge_of

WARPS = 4


@triton.jit
def place(starts, patches, blocks, TEMPORAL: tl.constexpr):
    """Of a program: its first row, the entry of its temporal patch, first pixel (y, x), start of its clip."""
    block = blocks + 4 * tl.program_id(0).to(tl.int64)
    entry = patches + tl.load(block).to(tl.int64) * (4 + TEMPORAL)
    row = tl.load(entry) + tl.load(block + 1)
    clip = tl.load(starts + tl.load(entry + 3))
    return row, entry, tl.load(block + 2), tl.load(block + 3), clip


@triton.jit
def changed(x, mean, std, inverse, scale, CHANGE: tl.constexpr, BYTES: tl.constexpr):
    """Values of one channel, normalised, multiplied, or as they are."""
    if CHANGE == "normalise":
        x = x.to(tl.float32) - mean
        if BYTES:
            near = x * inverse
            x = tl.fma(tl.fma(-near, std, x), inverse, near)
        else:
            x = tl.div_rn(x, std)
    elif CHANGE == "rescale":
        x = x.to(tl.float32) * scale
    return x


@triton.jit(do_not_specialize=["shift"])
def pack_kernel(
    frames,
    out,
    starts,
    patches,
    blocks,
    mean_0,
    mean_1,
    mean_2,
    std_0,
    std_1,
    std_2,
    inverse_0,
    inverse_1,
    inverse_2,
    scale,
    shift,
    CHANGE: tl.constexpr,
    BYTES: tl.constexpr,
    REPEAT: tl.constexpr,
    LAST: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    CELLS: tl.constexpr,
):
    row, entry, y, x, clip = place(starts, patches, blocks, TEMPORAL)
    STEP: tl.constexpr = 3 if LAST else 1
    width = tl.load(entry + 2).to(tl.int32) * PATCH
    plane = 1 if LAST else tl.load(entry + 1).to(tl.int32) * PATCH * width
    APART: tl.constexpr = TEMPORAL * PATCH * PATCH
    cell = tl.arange(0, CELLS)
    mask = cell < PATCH * PATCH
    inside = (cell // PATCH * width + cell % PATCH) * STEP
    for r in tl.static_range(MERGE * MERGE):
        corner = clip + ((y + r // MERGE * PATCH) * width + x + r % MERGE * PATCH) * STEP
        write = out + (row + r) * (3 * TEMPORAL * PATCH * PATCH) + (cell + shift)
        for f in tl.static_range(TEMPORAL):
            start = tl.load(entry + 4 + f)
            shown = mask
            if not REPEAT and f > 0:
                shown = mask & (start != tl.load(entry + 3 + f))
            read = frames + (corner + start) + inside
            # all three are on their way before the first is written: a store would hold up the loads behind it
            v0 = tl.load(read, mask=shown, other=0)
            v1 = tl.load(read + plane, mask=shown, other=0)
            v2 = tl.load(read + 2 * plane, mask=shown, other=0)
            v0 = changed(v0, mean_0, std_0, inverse_0, scale, CHANGE, BYTES)
            v1 = changed(v1, mean_1, std_1, inverse_1, scale, CHANGE, BYTES)
            v2 = changed(v2, mean_2, std_2, inverse_2, scale, CHANGE, BYTES)
            where = write + f * (PATCH * PATCH)
            kind = out.dtype.element_ty
            tl.store(where, v0.to(kind), mask=mask, cache_modifier=".cs")
            tl.store(where + APART, v1.to(kind), mask=mask, cache_modifier=".cs")
            tl.store(where + 2 * APART, v2.to(kind), mask=mask, cache_modifier=".cs")


@triton.jit
def unpack_kernel(
    rows,
    out,
    starts,
    patches,
    blocks,
    TOTAL: tl.constexpr,
    SUM: tl.constexpr,
    LAST: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    CELLS: tl.constexpr,
):
    row, entry, y, x, clip = place(starts, patches, blocks, TEMPORAL)
    STEP: tl.constexpr = 3 if LAST else 1
    width = tl.load(entry + 2).to(tl.int32) * PATCH
    plane = 1 if LAST else tl.load(entry + 1).to(tl.int32) * PATCH * width
    cell = tl.arange(0, CELLS)
    mask = cell < PATCH * PATCH
    inside = (cell // PATCH * width + cell % PATCH) * STEP
    for r in tl.static_range(MERGE * MERGE):
        corner = clip + ((y + r // MERGE * PATCH) * width + x + r % MERGE * PATCH) * STEP
        read = rows + (row + r) * (3 * TEMPORAL * PATCH * PATCH) + cell
        for c in tl.static_range(3):
            added = tl.zeros((CELLS,), dtype=SUM)
            for f in tl.static_range(TEMPORAL - 1, -1, -1):
                start = tl.load(entry + 4 + f)
                own = True
                if f > 0:
                    own = start != tl.load(entry + 3 + f)
                value = tl.load(read + (c * TEMPORAL + f) * (PATCH * PATCH), mask=mask, other=0)
                if TOTAL:
                    added += value.to(SUM)
                    value = added.to(out.dtype.element_ty)
                    added = tl.where(own, 0.0, added)
                tl.store(out + (corner + start + c * plane) + inside, value, mask=mask & own)


def pack_video(
    frames: Tensor,
    out: Tensor,
    starts: Tensor,
    patches: Tensor,
    blocks: Tensor,
    family: Family,
    channels_last: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    scale: float | None,
    repeat: bool,
) -> None:
    """Fill `out` [rows, patch_dim] from `frames` and what else `starts` point at. Tables: `PatchTables`."""
    if out.numel() == 0:
        return
    change = "normalise" if mean is not None else "copy" if scale is None else "rescale"
    mean, std = tuple(mean or (0.0,) * 3), tuple(std or (1.0,) * 3)
    inverse = [float(np.float32(1) / np.float32(s)) for s in std]
    # the interpreter rounds an fma twice
    bytes_alone = frames.dtype == torch.uint8 and frames.is_cuda
    with torch.cuda.device_of(frames):
        pack_kernel[(len(blocks),)](
            frames,
            out,
            starts,
            patches,
            blocks,
            *mean,
            *std,
            *inverse,
            1.0 if scale is None else scale,
            0,  # not known when it is compiled: neighbours in a patch go to neighbouring threads, one value each
            CHANGE=change,
            BYTES=bytes_alone and divides_bytes(mean, std),
            REPEAT=repeat,
            **shape_of(family, channels_last),
        )


def unpack_video(
    rows: Tensor,
    out: Tensor,
    starts: Tensor,
    patches: Tensor,
    blocks: Tensor,
    family: Family,
    channels_last: bool,
    total: bool,
) -> None:
    """Fill the buffer `out` [values] from `rows`; with `total`, repeats of a frame are added."""
    if rows.numel() == 0:
        return
    with torch.cuda.device_of(rows):
        unpack_kernel[(len(blocks),)](
            rows,
            out,
            starts,
            patches,
            blocks,
            TOTAL=total,
            SUM=tl.float64 if rows.dtype == torch.float64 else tl.float32,
            **shape_of(family, channels_last),
        )


@functools.cache
def divides_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> bool:
    """Whether (x − mean) / std has the bits of IEEE division, of every byte x, where a reciprocal and fma make it."""
    x = np.arange(256, dtype=np.float32)[:, None] - np.array(mean, np.float32)
    by = np.array(std, np.float32)
    inverse = np.float32(1) / by
    near = x * inverse
    wide = np.longdouble
    left = (x.astype(wide) - near.astype(wide) * by.astype(wide)).astype(np.float32)
    made = (near.astype(wide) + left.astype(wide) * inverse.astype(wide)).astype(np.float32)
    return np.array_equal(made, x / by)


def shape_of(family: Family, channels_last: bool) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {
        "LAST": channels_last,
        "PATCH": family.patch_size,
        "MERGE": merge_of(family),
        "TEMPORAL": family.temporal_patch_size,
        "CELLS": triton.next_power_of_2(family.patch_size**2),
        "num_warps": WARPS,
    }
