"""Fused linear selected logprob, backward: D · weight and Dᵀ · x, and the rows that go in and out of them.

Live rows come first. How many there are is read on the device, so that the others cost nothing and the host does not
wait. D and x hold zeros from there to the end of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mmpack.ops.logprobs.linear.blocks import Block
from mmpack.ops.logprobs.linear.tiles import (
    HOPPER,
    dot,
    place,
    programs_of,
    shape_arguments,
    tiles_of,
)


class Operands(NamedTuple):
    """D [R, C], x [R, H], weight [V, H], D · weight and Dᵀ · x as the products read and write them."""

    grad: TensorDescriptor
    grad_by_row: TensorDescriptor
    grad_by_column: TensorDescriptor
    x: TensorDescriptor
    x_by_depth: TensorDescriptor
    weight: TensorDescriptor
    weight_by_depth: TensorDescriptor
    total: TensorDescriptor | None
    grad_weight: TensorDescriptor | None


def make_operands(
    grad: Tensor, x: Tensor, weight: Tensor, total: Tensor | None, grad_weight: Tensor | None
) -> Operands:
    """Made once per block: each costs some time on the host."""
    rows, columns, depth, *_ = tiles_of(x.device)
    describe = TensorDescriptor.from_tensor
    half = [rows, columns // 2]
    return Operands(
        describe(grad, [rows, columns]),
        describe(grad, [rows, depth]),
        describe(grad, [depth, rows]),
        describe(x, [rows, depth]),
        describe(x, [depth, columns]),
        describe(weight, [columns, depth]),
        describe(weight, [depth, columns]),
        None if total is None else describe(total, half),
        None if grad_weight is None else describe(grad_weight, half),
    )


def gather_live(hidden: Tensor, block: Block, out: Tensor) -> None:
    """out [R, H] = hidden[block.reads], 0 for the rows that are not live."""
    gather_rows_kernel[(len(out), triton.cdiv(out.shape[1], 1024))](
        out, block.reads, hidden, block.live, block.first, out.shape[1], out.stride(0),
        hidden.stride(0), hidden.stride(1), COLUMNS=1024, num_warps=4,
    )  # fmt: skip


def multiply(operands: Operands, block: Block, first_column: int) -> None:
    """total [R, H] float32 += D · weight; grad_weight [V, H] = Dᵀ · x, plus what is there after the first block."""
    tiles, programs = tiles_of(block.live.device), programs_of(block.live.device)
    vocab, width = operands.weight.shape
    products_kernel[(programs,)](
        operands.grad_by_row,
        operands.weight_by_depth,
        operands.total,
        operands.grad_by_column,
        operands.x_by_depth,
        operands.grad_weight,
        block.live,
        block.first,
        operands.x.shape[0],
        first_column,
        min(operands.grad.shape[1], vocab - first_column),
        width,
        ADD=block.first > 0,
        REDUCE=tiles is HOPPER,
        PROGRAMS=programs,
        **shape_arguments(tiles),
    )


def scatter_live(out: Tensor, block: Block, total: Tensor) -> None:
    """out[block.writes[i]] = total[i] for the live i."""
    scatter_rows_kernel[(len(total), triton.cdiv(total.shape[1], 1024))](
        out, block.writes, total, block.live, block.first, total.shape[1], out.stride(0),
        total.stride(0), COLUMNS=1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def live_rows(live_ptr, first_row, max_rows):
    """Live rows of this block."""
    return min(max(tl.load(live_ptr) - first_row, 0), max_rows)


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of x [ROWS, COLUMNS]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["first_row", "max_rows"])
def products_kernel(
    grad_by_row,  # [ROWS, DEPTH] of D
    weight_desc,  # [DEPTH, COLUMNS]
    total_desc,  # [ROWS, COLUMNS / 2] of D · weight, float32
    grad_by_column,  # [DEPTH, ROWS] of D
    x_desc,  # [DEPTH, COLUMNS]
    grad_weight_desc,  # [ROWS, COLUMNS / 2] of Dᵀ · x
    live_ptr,
    first_row,
    max_rows,
    first_column,
    num_columns,
    width,
    ADD: tl.constexpr,
    REDUCE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    live = live_rows(live_ptr, first_row, max_rows)
    program, tiles_n = tl.program_id(0), tl.cdiv(width, COLUMNS)
    long_tiles, long_steps = 0, tl.cdiv(num_columns, DEPTH)
    if total_desc is not None:
        tiles_m = tl.cdiv(live, ROWS)
        long_tiles = tiles_m * tiles_n
        for tile in tl.range(program, long_tiles, PROGRAMS, flatten=True):
            m, n = place(tile, tiles_m, tiles_n, GROUP)
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k in range(long_steps):
                a = grad_by_row.load([m * ROWS, k * DEPTH])
                b = weight_desc.load([first_column + k * DEPTH, n * COLUMNS])
                total = dot(a, b, total)
            left, right = halves(total, ROWS, COLUMNS)
            at_left = [m * ROWS, n * COLUMNS]
            at_right = [m * ROWS, n * COLUMNS + COLUMNS // 2]
            if REDUCE:  # one addition per element and launch, made in memory: nothing to wait for
                total_desc.atomic_add(at_left, left)
                total_desc.atomic_add(at_right, right)
            else:
                total_desc.store(at_left, left + total_desc.load(at_left))
                total_desc.store(at_right, right + total_desc.load(at_right))
    if grad_weight_desc is not None:
        tiles_m, steps = tl.cdiv(num_columns, ROWS), max(tl.cdiv(live, DEPTH), 1)
        tiles = tiles_m * tiles_n
        if ADD:
            tiles = tl.where(live > 0, tiles, 0)
        # The last `idle` programs had one tile less above: they take `more` of these first, which fit into its time,
        # and what is left over at the end.
        idle = PROGRAMS - long_tiles % PROGRAMS
        more = min(long_steps // steps, tiles // idle)
        back = PROGRAMS - 1 - program
        first, shared = tl.where(back < idle, more, 0), idle * more
        count = first + tl.cdiv(max(tiles - shared - back, 0), PROGRAMS)
        for i in tl.range(0, count, flatten=True):
            tile = back + tl.where(i < first, i * idle, shared + (i - first) * PROGRAMS)
            m, n = place(tile, tiles_m, tiles_n, GROUP)
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k in range(steps):
                a = grad_by_column.load([k * DEPTH, m * ROWS])
                b = x_desc.load([k * DEPTH, n * COLUMNS])
                total = dot(a.T, b, total)
            left, right = halves(total, ROWS, COLUMNS)
            at_left = [first_column + m * ROWS, n * COLUMNS]
            at_right = [first_column + m * ROWS, n * COLUMNS + COLUMNS // 2]
            if ADD:
                left += grad_weight_desc.load(at_left).to(tl.float32)
                right += grad_weight_desc.load(at_right).to(tl.float32)
            grad_weight_desc.store(at_left, left.to(grad_weight_desc.dtype))
            grad_weight_desc.store(at_right, right.to(grad_weight_desc.dtype))


@triton.jit(do_not_specialize=["first_row"])
def gather_rows_kernel(
    out_ptr,
    row_ptr,
    hidden_ptr,
    live_ptr,
    first_row,
    width,
    out_stride,
    hidden_stride,
    column_stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    alive = row < tl.load(live_ptr) - first_row
    at = tl.load(row_ptr + row).to(tl.int64) * hidden_stride + columns * column_stride
    value = tl.load(hidden_ptr + at, mask=inside & alive, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * out_stride + columns, value, mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def scatter_rows_kernel(
    out_ptr,
    row_ptr,
    total_ptr,
    live_ptr,
    first_row,
    width,
    out_stride,
    total_stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    if row < tl.load(live_ptr) - first_row:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        value = tl.load(total_ptr + row.to(tl.int64) * total_stride + columns, mask=inside)
        at = tl.load(row_ptr + row).to(tl.int64) * out_stride + columns
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)
