"""Frames to rows of patches and back: one launch each, one read and one write of each value.

A program has the patches of one token, a thread some pixels of each channel. Bytes are read and written as words of the
2 or 4 neighbouring pixels that fit a patch's rows; all words of a program are on their way before one is used.
Normalised values are rounded after each step, as PyTorch rounds them: subtraction, then IEEE
division, or three steps that give its bits (Markstein 1990) where that was checked for all values of a byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.patches.call import Change, PatchLayout, find_clips
from mmpack.video.patches import merge_of

WARPS = 4
NORMALIZED = 2048  # bytes of a program that has patches already
WORDS = {2: torch.int16, 4: torch.int32}


@triton.jit
def place(
    shifts,
    patches,
    blocks,
    SEVERAL: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    UNIT: tl.constexpr,
    LAST: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Where a program's items (UNIT neighbouring pixels of a frame of a patch each) lie in its token's first patch.

    Returns places in frames (in UNITs), distances of channels, and of patches down and across there; places in rows (in
    values); which are items, which of them are the first slot of their frame, and how many slots behind repeat it.
    """
    block = blocks + 4 * tl.program_id(0).to(tl.int64)
    entry = patches + tl.load(block).to(tl.int64) * (4 + TEMPORAL)
    row = tl.load(entry) + tl.load(block + 1)
    RUNS: tl.constexpr = PATCH * PATCH // UNIT  # items of a frame of a patch
    STEP: tl.constexpr = 3 if LAST else 1
    width = tl.load(entry + 2) * PATCH
    plane = 1 if LAST else tl.load(entry + 1) * PATCH * width // UNIT
    item = tl.arange(0, ITEMS)
    mask = item < TEMPORAL * RUNS
    f, cell = item // RUNS, item % RUNS * UNIT
    start = tl.load(entry + 4 + f, mask=mask, other=0)
    first = (f == 0) | (tl.load(entry + 3 + f, mask=mask, other=0) != start)
    repeats = tl.zeros((ITEMS,), dtype=tl.int32)
    for k in tl.static_range(1, TEMPORAL):
        repeats += ((f < k) & (tl.load(entry + 4 + k) == start)).to(tl.int32)
    y, x = tl.load(block + 2) + cell // PATCH, tl.load(block + 3) + cell % PATCH
    frame = start + (y * width + x) * STEP
    if SEVERAL:
        frame += tl.load(shifts + tl.load(entry + 3))
    frame = frame // UNIT
    down, across = PATCH * width * STEP // UNIT, PATCH * STEP // UNIT
    kept = row * (3 * TEMPORAL * PATCH * PATCH) + item * UNIT
    return frame, plane, down, across, kept, mask, first, repeats


@triton.jit
def value_of(w0, w1, w2, C: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr):
    """Channel C of pixel P of three words; of single values the one of C."""
    AT: tl.constexpr = 3 * P + C if LAST and UNIT > 1 else C * UNIT + P
    if AT // UNIT == 0:
        word = w0
    elif AT // UNIT == 1:
        word = w1
    else:
        word = w2
    if UNIT > 1:
        word = (word >> (8 * (AT % UNIT))) & 255
    return word


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


@triton.jit
def channel(
    w0,
    w1,
    w2,
    mean,
    std,
    inverse,
    scale,
    C: tl.constexpr,
    CHANGE: tl.constexpr,
    BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    LAST: tl.constexpr,
):
    """[items, UNIT]: channel C of each item's pixels, changed."""
    v0 = value_of(w0, w1, w2, C, 0, UNIT, LAST)
    v0 = changed(v0, mean, std, inverse, scale, CHANGE, BYTES)
    if UNIT == 1:
        out = v0[:, None]
    else:
        v1 = value_of(w0, w1, w2, C, 1, UNIT, LAST)
        v1 = changed(v1, mean, std, inverse, scale, CHANGE, BYTES)
        if UNIT == 2:
            out = tl.join(v0, v1)
        else:
            v2 = value_of(w0, w1, w2, C, 2, UNIT, LAST)
            v2 = changed(v2, mean, std, inverse, scale, CHANGE, BYTES)
            v3 = value_of(w0, w1, w2, C, 3, UNIT, LAST)
            v3 = changed(v3, mean, std, inverse, scale, CHANGE, BYTES)
            out = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (v0.shape[0], 4))
    return out


@triton.jit
def pack_kernel(
    frames,
    out,
    shifts,
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
    SEVERAL: tl.constexpr,
    CHANGE: tl.constexpr,
    BYTES: tl.constexpr,
    REPEAT: tl.constexpr,
    LAST: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    UNIT: tl.constexpr,
    ITEMS: tl.constexpr,
):
    read, plane, down, across, write, mask, first, _ = place(
        shifts, patches, blocks, SEVERAL, PATCH, MERGE, TEMPORAL, UNIT, LAST, ITEMS
    )
    shown = mask if REPEAT else mask & first
    words = ()
    for r in tl.static_range(MERGE * MERGE):
        at = frames + read + (r // MERGE * down + r % MERGE * across)
        w0 = tl.load(at, mask=shown, other=0)
        w1 = tl.load(at + plane, mask=shown, other=0)
        w2 = tl.load(at + 2 * plane, mask=shown, other=0)
        words = words + ((w0, w1, w2),)  # type: ignore[assignment]
    PLANE: tl.constexpr = TEMPORAL * PATCH * PATCH
    where = out + write[:, None] + tl.arange(0, UNIT)[None, :]
    kind = out.dtype.element_ty
    for r in tl.static_range(MERGE * MERGE):
        w0, w1, w2 = words[r]
        v0 = channel(w0, w1, w2, mean_0, std_0, inverse_0, scale, 0, CHANGE, BYTES, UNIT, LAST)
        v1 = channel(w0, w1, w2, mean_1, std_1, inverse_1, scale, 1, CHANGE, BYTES, UNIT, LAST)
        v2 = channel(w0, w1, w2, mean_2, std_2, inverse_2, scale, 2, CHANGE, BYTES, UNIT, LAST)
        at = where + 3 * PLANE * r
        tl.store(at, v0.to(kind), mask=mask[:, None], cache_modifier=".cs")
        tl.store(at + PLANE, v1.to(kind), mask=mask[:, None], cache_modifier=".cs")
        tl.store(at + 2 * PLANE, v2.to(kind), mask=mask[:, None], cache_modifier=".cs")


@triton.jit
def piece(words, AT: tl.constexpr, UNIT: tl.constexpr):
    """Byte AT of an item's pixels, channels last, in its place in its word; `words`: one of each channel."""
    return value_of(words[0], words[1], words[2], AT % 3, AT // 3, UNIT, False) << (8 * (AT % UNIT))


@triton.jit
def interleaved(words, K: tl.constexpr, UNIT: tl.constexpr):
    """Word K of an item's pixels, channels last."""
    word = piece(words, UNIT * K, UNIT) | piece(words, UNIT * K + 1, UNIT)
    if UNIT == 4:
        word |= piece(words, UNIT * K + 2, UNIT) | piece(words, UNIT * K + 3, UNIT)
    return word


@triton.jit
def with_repeats(read, repeats, mask, SUM: tl.constexpr, PATCH: tl.constexpr, MOST: tl.constexpr):
    """What stands at `read`, and in the `repeats` slots behind it, added from the last to the first."""
    total = tl.zeros(read.shape, dtype=SUM)
    for k in tl.static_range(MOST - 1, -1, -1):
        there = mask & (k <= repeats)
        total += tl.load(read + k * PATCH * PATCH, mask=there, other=0).to(SUM)
    return total


@triton.jit
def unpack_kernel(
    rows,
    out,
    patches,
    blocks,
    TOTAL: tl.constexpr,
    SUM: tl.constexpr,
    LAST: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    UNIT: tl.constexpr,
    ITEMS: tl.constexpr,
):
    write, plane, down, across, read, mask, first, repeats = place(
        patches, patches, blocks, False, PATCH, MERGE, TEMPORAL, UNIT, LAST, ITEMS
    )
    PLANE: tl.constexpr = TEMPORAL * PATCH * PATCH // UNIT
    shown = mask & first
    words = ()
    for r in tl.static_range(MERGE * MERGE):
        at = rows + read // UNIT + 3 * PLANE * r
        if TOTAL:
            w0 = with_repeats(at, repeats, shown, SUM, PATCH, TEMPORAL)
            w1 = with_repeats(at + PLANE, repeats, shown, SUM, PATCH, TEMPORAL)
            w2 = with_repeats(at + 2 * PLANE, repeats, shown, SUM, PATCH, TEMPORAL)
        else:
            w0 = tl.load(at, mask=shown, other=0)
            w1 = tl.load(at + PLANE, mask=shown, other=0)
            w2 = tl.load(at + 2 * PLANE, mask=shown, other=0)
        words = words + ((w0, w1, w2),)  # type: ignore[assignment]
    kind = out.dtype.element_ty
    for r in tl.static_range(MERGE * MERGE):
        w0, w1, w2 = words[r]
        if LAST and UNIT > 1:
            w0 = interleaved(words[r], 0, UNIT)
            w1 = interleaved(words[r], 1, UNIT)
            w2 = interleaved(words[r], 2, UNIT)
        at = out + write + (r // MERGE * down + r % MERGE * across)
        tl.store(at, w0.to(kind), mask=shown)
        tl.store(at + plane, w1.to(kind), mask=shown)
        tl.store(at + 2 * plane, w2.to(kind), mask=shown)


@triton.jit
def normalize_kernel(rows, values, out, count, PLANE: tl.constexpr, BLOCK: tl.constexpr):
    """`values` [3, 256] of bytes; PLANE bytes of a row are of one channel."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    byte = tl.load(rows + at, mask=mask, other=0).to(tl.int32)
    channel = (at // PLANE % 3).to(tl.int32)
    value = tl.load(values + channel * 256 + byte, mask=mask, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask, cache_modifier=".cs")


def normalize_bytes(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """`values` [3, 256] of the bytes `rows` [patches, patch_dim] into `out`."""
    count, plane = rows.numel(), rows.shape[1] // 3
    with torch.cuda.device_of(rows):
        normalize_kernel[(triton.cdiv(count, NORMALIZED),)](
            rows, values, out, count, PLANE=plane, BLOCK=NORMALIZED
        )


def pack_video(clips: Sequence[Tensor], out: Tensor, layout: PatchLayout, change: Change) -> None:
    """Fill `out` [rows, patch_dim] from clips, or from one buffer of all."""
    if out.numel() == 0:
        return
    frames = clips[0]
    shifts, aligned = find_clips(clips, layout.sizes)
    kind, mean, std, scale = change.factors
    inverse = [float(np.float32(1) / np.float32(s)) for s in std]
    by_fma = frames.dtype == torch.uint8 and frames.is_cuda  # the interpreter rounds an fma twice
    shape = shape_of(layout, frames.dtype, aligned)
    with torch.cuda.device_of(frames):
        pack_kernel[(len(layout.blocks),)](
            as_words(frames, shape["UNIT"]),
            out,
            layout.patches if shifts is None else shifts,
            layout.patches,
            layout.blocks,
            *mean,
            *std,
            *inverse,
            scale,
            SEVERAL=shifts is not None,
            CHANGE=kind,
            BYTES=by_fma and divides_bytes(mean, std),
            REPEAT=change.repeat,
            **shape,
        )


def unpack_video(rows: Tensor, out: Tensor, layout: PatchLayout, total: bool) -> None:
    """Fill the buffer `out` [values] from `rows`; with `total`, repeats of a frame are added."""
    if rows.numel() == 0:
        return
    aligned = 1 if total else math.gcd(4, rows.data_ptr(), out.data_ptr())
    shape = shape_of(layout, rows.dtype, aligned)
    with torch.cuda.device_of(rows):
        unpack_kernel[(len(layout.blocks),)](
            as_words(rows, shape["UNIT"]),
            as_words(out, shape["UNIT"]),
            layout.patches,
            layout.blocks,
            TOTAL=total,
            SUM=tl.float64 if rows.dtype == torch.float64 else tl.float32,
            **shape,
        )


def as_words(values: Tensor, unit: int) -> Tensor:
    """Contiguous bytes as words of `unit` bytes; a unit of 1 leaves values as they are."""
    if unit == 1:
        return values
    whole = values.numel() // unit * unit
    return values.view(-1)[:whole].view(WORDS[unit])


def shape_of(layout: PatchLayout, dtype: torch.dtype, aligned: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    family = layout.geometry
    patch, merge, temporal = family.patch_size, merge_of(family), family.temporal_patch_size
    unit = math.gcd(4, patch, aligned) if dtype == torch.uint8 else 1
    items = temporal * patch**2 // unit
    return {
        "LAST": layout.channels_last,
        "PATCH": patch,
        "MERGE": merge,
        "TEMPORAL": temporal,
        "UNIT": unit,
        "ITEMS": triton.next_power_of_2(items),
        "num_warps": WARPS if unit > 1 else 2 * WARPS,
    }


@functools.cache
def divides_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> bool:
    """Whether (x − mean) / std has the bits of IEEE division, of every byte x, where a reciprocal and fma make it.

    In three steps: Markstein 1990.
    """
    x = np.arange(256, dtype=np.float32)[:, None] - np.array(mean, np.float32)
    by = np.array(std, np.float32)
    inverse = np.float32(1) / by
    near = x * inverse
    wide = np.longdouble
    left = (x.astype(wide) - near.astype(wide) * by.astype(wide)).astype(np.float32)
    made = (near.astype(wide) + left.astype(wide) * inverse.astype(wide)).astype(np.float32)
    return np.array_equal(made, x / by)
