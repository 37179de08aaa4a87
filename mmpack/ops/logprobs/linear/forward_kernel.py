"""Fused linear selected logprob, forward: logits [S, V] live in registers, a tile at a time.

A persistent product, K in one fixed order. Each tile of columns leaves three numbers per row, which `merge` adds up in
the order of the tiles. x [S, H] and weight [V, H] are bf16 or fp16; logits count in units of log 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mmpack.ops.logprobs.linear.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    cap,
    dot,
    place,
    programs_of,
    scaled_logits,
    shape_arguments,
    tiles_of,
)


class Partials(NamedTuple):
    """Per tile of columns and row, [V / columns, S] float32: maximum, sums of 2^d and d · 2^d, d = logit - maximum."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor


def statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    entropy: bool,
    store: bool,
) -> tuple[Partials, Tensor | None]:
    """Partials of every tile and, with `store`, 2^d as [S, V rounded up to tiles] in x's dtype."""
    (count, width), vocab, tiles = x.shape, weight.shape[0], tiles_of(x.device)
    num_tiles = triton.cdiv(vocab, tiles.columns)
    shape = num_tiles, count
    maximum, total = (torch.empty(shape, device=x.device) for _ in range(2))
    weighted = torch.empty(shape if entropy else (num_tiles, 0), device=x.device)
    stored = x.new_empty(count, num_tiles * tiles.columns) if store else None
    if count:
        stored_block = [tiles.rows, tiles.columns]
        programs = programs_of(x.device)
        statistics_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
            TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.depth]),
            None if stored is None else TensorDescriptor.from_tensor(stored, stored_block),
            bias,
            maximum,
            total,
            weighted,
            count,
            vocab,
            width,
            LOG2_E.value / temperature,
            0.0 if softcap is None else softcap,
            ENTROPY=entropy,
            STORE=store,
            SOFTCAP=softcap is not None,
            PROGRAMS=programs,
            **shape_arguments(tiles),
        )
    return Partials(maximum, total, weighted), stored


def merge(partials: Partials, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Over all tiles: maximum and log2 of the sum, [S] each, and the entropy in nats ([0] unless asked for)."""
    num_tiles, count = partials.maximum.shape
    device = partials.maximum.device
    maximum, log_total = (torch.empty(count, device=device) for _ in range(2))
    row_entropy = torch.empty(count if entropy else 0, device=device)
    if count:
        merge_kernel[(triton.cdiv(count, 32),)](
            *partials, maximum, log_total, row_entropy, count, num_tiles,
            ENTROPY=entropy, ROWS=32, TILES=64, num_warps=4,
        )  # fmt: skip
    return maximum, log_total, row_entropy


def target_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slot_of: Tensor,
    columns: Tensor,
    softcap: float | None,
) -> Tensor:
    """Logits [N] float32 at (slot, column), in nats and before the temperature; -inf for columns outside [0, V).

    The diagonal of a small product: the same steps as the large one takes, so the same bits.
    """
    logits = torch.empty(len(slot_of), device=x.device)
    if len(slot_of):
        tiles = tiles_of(x.device)
        size = min(tiles.rows, 64)
        target_kernel[(triton.cdiv(len(slot_of), size),)](
            x, weight, bias, slot_of, columns, logits, len(slot_of), weight.shape[0], x.shape[1],
            x.stride(0), weight.stride(0), 0.0 if softcap is None else softcap,
            SOFTCAP=softcap is not None, TOKENS=size, DEPTH=2 * tiles.depth,
            num_warps=4, num_stages=tiles.stages,
        )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["count"])
def statistics_kernel(
    x_desc,
    weight_desc,
    stored_desc,
    bias_ptr,
    maximum_ptr,
    total_ptr,
    weighted_ptr,
    count,
    vocab,
    width,
    scale,
    softcap,
    ENTROPY: tl.constexpr,
    STORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n, steps = tl.cdiv(count, ROWS), tl.cdiv(vocab, COLUMNS), tl.cdiv(width, DEPTH)
    # Flattened: the first loads of a tile start while the tile before it computes. So no branches in the body.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        z = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            a = x_desc.load([m * ROWS, k * DEPTH])
            b = weight_desc.load([n * COLUMNS, k * DEPTH])
            z = dot(a, b.T, z)
        rows, columns = m * ROWS + tl.arange(0, ROWS), n * COLUMNS + tl.arange(0, COLUMNS)
        logits, _ = scaled_logits(z, bias_ptr, columns, vocab, scale, softcap, SOFTCAP)
        maximum = tl.max(logits, 1)
        d = logits - maximum[:, None]
        p = tl.exp2(d)
        out = n.to(tl.int64) * count + rows
        inside = rows < count
        tl.store(maximum_ptr + out, maximum, mask=inside)
        tl.store(total_ptr + out, tl.sum(p, 1), mask=inside)
        if ENTROPY:
            tl.store(weighted_ptr + out, tl.sum(p * d, 1), mask=inside)
        if STORE:
            stored_desc.store([m * ROWS, n * COLUMNS], p.to(stored_desc.dtype))


# Specialised on `count`, the layout and with it the order of the sums would depend on the batch.
@triton.jit(do_not_specialize=["count"])
def merge_kernel(
    tile_maximum_ptr,
    tile_total_ptr,
    tile_weighted_ptr,
    maximum_ptr,
    log_total_ptr,
    entropy_ptr,
    count,
    num_tiles,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < count
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        mask = (tiles < num_tiles)[:, None] & inside[None, :]
        at = tiles.to(tl.int64)[:, None] * count + rows[None, :]
        maximum = tl.maximum(
            maximum, tl.max(tl.load(tile_maximum_ptr + at, mask=mask, other=LOWEST), 0)
        )
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        mask = (tiles < num_tiles)[:, None] & inside[None, :]
        at = tiles.to(tl.int64)[:, None] * count + rows[None, :]
        d = tl.load(tile_maximum_ptr + at, mask=mask, other=LOWEST) - maximum[None, :]
        s = tl.load(tile_total_ptr + at, mask=mask, other=0.0)
        factor = tl.exp2(d)
        total += tl.sum(s * factor, 0)
        if ENTROPY:
            w = tl.load(tile_weighted_ptr + at, mask=mask, other=0.0)
            weighted += tl.sum((w + d * s) * factor, 0)
    log_total = tl.log2(total)
    tl.store(maximum_ptr + rows, maximum, mask=inside)
    tl.store(log_total_ptr + rows, log_total, mask=inside)
    if ENTROPY:
        tl.store(entropy_ptr + rows, (log_total - weighted / total) * LN_2, mask=inside)


@triton.jit
def target_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    slot_ptr,
    column_ptr,
    logit_ptr,
    num_tokens,
    vocab,
    width,
    x_stride,
    weight_stride,
    softcap,
    SOFTCAP: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    index = tl.arange(0, TOKENS)
    tokens = tl.program_id(0) * TOKENS + index
    slots = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=0)
    columns = tl.load(column_ptr + tokens, mask=tokens < num_tokens, other=-1)
    inside = (columns >= 0) & (columns < vocab)
    columns = tl.where(inside, columns, 0)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + slots.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride + k[None, :]
    z = tl.zeros((TOKENS, TOKENS), dtype=tl.float32)
    for first in range(0, width, DEPTH):
        mask = (first + k < width)[None, :]
        a = tl.load(x_at + first, mask=mask, other=0.0)
        b = tl.load(weight_at + first, mask=mask, other=0.0)
        z = dot(a, b.T, z)
    logit = tl.sum(tl.where(index[:, None] == index[None, :], z, 0.0), 1)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr + columns).to(tl.float32)
    if SOFTCAP:
        logit = cap(logit, softcap)
    tl.store(logit_ptr + tokens, tl.where(inside, logit, -float("inf")), mask=tokens < num_tokens)
