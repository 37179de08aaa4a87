"""Fused linear selected logprob, backward: the gradient D to the logits, [rows, chunk of columns] at a time.

Its products with weight and x are in product_kernels, which also says which rows are live.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.logprobs.linear.blocks import Block, LiveFirst
from mmpack.ops.logprobs.linear.call import Call, Statistics
from mmpack.ops.logprobs.linear.product_kernels import Operands, live_rows
from mmpack.ops.logprobs.linear.tiles import (
    LOG2_E,
    dot,
    place,
    programs_of,
    scaled_logits,
    shape_arguments,
    tiles_of,
)

FAR = tl.constexpr(-1e4)  # log2 of a probability that is 0, in a product that may not overflow


def logit_gradient(call: Call, operands: Operands, block: Block, first_column: int) -> None:
    """Fill D with p · (along + slope · log2 p), p computed again."""
    tiles, programs = tiles_of(block.live.device), programs_of(block.live.device)
    vocab, width = operands.weight.shape
    logit_gradient_kernel[(programs,)](
        operands.x,
        operands.weight,
        operands.grad,
        call.bias,
        block.live,
        block.log_total,
        block.along,
        block.slope,
        block.first,
        operands.x.shape[0],
        first_column,
        min(operands.grad.shape[1], vocab - first_column),
        vocab,
        width,
        LOG2_E.value / call.temperature,
        0.0 if call.softcap is None else call.softcap,
        SOFTCAP=call.softcap is not None,
        PROGRAMS=programs,
        **shape_arguments(tiles),
    )


def stored_logit_gradient(
    call: Call, statistics: Statistics, grad: Tensor, block: Block, first_column: int
) -> None:
    """As `logit_gradient`, from the probabilities that the forward stored."""
    tiles, cap = tiles_of(grad.device), call.softcap
    num_tiles, count = statistics.tile_maximum.shape
    first_tile = first_column // tiles.columns
    chunk_tiles = min(grad.shape[1] // tiles.columns, num_tiles - first_tile)
    stored_logit_gradient_kernel[(chunk_tiles, triton.cdiv(len(grad), 32))](
        grad,
        statistics.stored,
        statistics.tile_maximum,
        block.slots,
        block.live,
        block.log_total,
        block.along,
        block.slope,
        block.first,
        len(grad),
        first_tile,
        count,
        grad.stride(0),
        statistics.stored.stride(0),
        0.0 if cap is None else call.temperature / (LOG2_E.value * cap),
        SOFTCAP=cap is not None,
        ROWS=32,
        TILE_ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        num_warps=4,
    )


def set_targets(
    grad: Tensor, rows: LiveFirst, columns: Tensor, first_row: int, first_column: int
) -> None:
    """D at the target of each of the N loss tokens that lie in this block and chunk."""
    count = len(columns)
    if count:
        set_targets_kernel[(triton.cdiv(count, 256),)](
            grad, rows.place, columns, rows.at_targets, count, first_row, len(grad), first_column,
            grad.shape[1], grad.stride(0), TOKENS=256, num_warps=4,
        )  # fmt: skip


def add_column_sums(grad: Tensor, block: Block, total: Tensor, first_column: int) -> None:
    """Add the sums over D's live rows to total [V] float32."""
    columns = min(grad.shape[1], len(total) - first_column)
    column_sums_kernel[(triton.cdiv(columns, 64),)](
        grad, block.live, total, block.first, len(grad), first_column, columns, grad.stride(0),
        ROWS=64, COLUMNS=64, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "max_rows"])
def logit_gradient_kernel(
    x_desc,
    weight_desc,
    grad_desc,
    bias_ptr,
    live_ptr,
    log_total_ptr,
    along_ptr,
    slope_ptr,
    first_row,
    max_rows,
    first_column,
    num_columns,
    vocab,
    width,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    live = live_rows(live_ptr, first_row, max_rows)
    tiles_m, tiles_n = tl.cdiv(live, ROWS), tl.cdiv(num_columns, COLUMNS)
    if first_row == 0:
        tiles_m = max(tiles_m, 1)  # for the products to read, which write zeros
    steps = tl.cdiv(width, DEPTH)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        z = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            a = x_desc.load([m * ROWS, k * DEPTH])
            b = weight_desc.load([first_column + n * COLUMNS, k * DEPTH])
            z = dot(a, b.T, z)
        rows = m * ROWS + tl.arange(0, ROWS)
        columns = first_column + n * COLUMNS + tl.arange(0, COLUMNS)
        inside = rows < live
        log_total = tl.load(log_total_ptr + rows, mask=inside, other=0.0)
        along = tl.load(along_ptr + rows, mask=inside, other=0.0)
        logits, raw = scaled_logits(z, bias_ptr, columns, vocab, scale, softcap, SOFTCAP)
        logp = logits - log_total[:, None]
        d = tl.exp2(logp)
        if slope_ptr is not None:
            slope = tl.load(slope_ptr + rows, mask=inside, other=0.0)
            d *= along[:, None] + slope[:, None] * tl.maximum(logp, FAR)
        else:
            d *= along[:, None]
        if SOFTCAP:
            d *= 1.0 - (raw / softcap) * (raw / softcap)
        d = tl.where(inside[:, None], d, 0.0)
        grad_desc.store([m * ROWS, n * COLUMNS], d.to(grad_desc.dtype))


@triton.jit(do_not_specialize=["first_row", "max_rows", "count"])
def stored_logit_gradient_kernel(
    grad_ptr,
    stored_ptr,
    tile_maximum_ptr,
    order_ptr,
    live_ptr,
    log_total_ptr,
    along_ptr,
    slope_ptr,
    first_row,
    max_rows,
    first_tile,
    count,
    grad_stride,
    stored_stride,
    to_cap,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    live = live_rows(live_ptr, first_row, max_rows)
    first = tl.program_id(1) * ROWS
    least = tl.where(first_row == 0, 1, 0)
    if first < max(tl.cdiv(live, TILE_ROWS), least) * TILE_ROWS:
        tile = tl.program_id(0)
        rows = first + tl.arange(0, ROWS)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = rows < live
        slots = tl.load(order_ptr + rows, mask=inside, other=0).to(tl.int64)
        log_total = tl.load(log_total_ptr + rows, mask=inside, other=0.0)
        along = tl.load(along_ptr + rows, mask=inside, other=0.0)
        maximum = tl.load(
            tile_maximum_ptr + (first_tile + tile).to(tl.int64) * count + slots,
            mask=inside,
            other=0.0,
        )
        at = slots[:, None] * stored_stride + (first_tile * COLUMNS + columns)[None, :]
        p = tl.load(stored_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        shift = maximum - log_total
        d = p * (along * tl.exp2(shift))[:, None]
        if slope_ptr is not None or SOFTCAP:
            log_p = tl.where(p > 0.0, tl.log2(p), 0.0)
        if slope_ptr is not None:
            slope = tl.load(slope_ptr + rows, mask=inside, other=0.0)
            d += p * (slope * tl.exp2(shift))[:, None] * (log_p + shift[:, None])
        if SOFTCAP:
            capped = (log_p + maximum[:, None]) * to_cap
            d *= 1.0 - capped * capped
        d = tl.where(inside[:, None], d, 0.0)
        out = rows.to(tl.int64)[:, None] * grad_stride + columns[None, :]
        tl.store(grad_ptr + out, d.to(grad_ptr.dtype.element_ty), mask=(rows < max_rows)[:, None])


@triton.jit
def set_targets_kernel(
    grad_ptr,
    row_ptr,
    column_ptr,
    value_ptr,
    num_tokens,
    first_row,
    num_rows,
    first_column,
    num_columns,
    grad_stride,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = tokens < num_tokens
    row = tl.load(row_ptr + tokens, mask=mask, other=-1).to(tl.int64) - first_row
    column = tl.load(column_ptr + tokens, mask=mask, other=-1) - first_column
    mask = (row >= 0) & (row < num_rows) & (column >= 0) & (column < num_columns)
    value = tl.load(value_ptr + tokens, mask=mask, other=0.0)
    at = row * grad_stride + column
    tl.store(grad_ptr + at, value.to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row", "max_rows"])
def column_sums_kernel(
    grad_ptr,
    live_ptr,
    total_ptr,
    first_row,
    max_rows,
    first_column,
    num_columns,
    grad_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    live = live_rows(live_ptr, first_row, max_rows)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    total = tl.load(total_ptr + first_column + columns, mask=inside, other=0.0)
    for first in range(0, live, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * grad_stride + columns[None, :]
        mask = (rows < live)[:, None] & inside[None, :]
        total += tl.sum(tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32), 0)
    tl.store(total_ptr + first_column + columns, total, mask=inside)
