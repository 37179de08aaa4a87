"""`product` in Triton: a persistent kernel of fixed tiles for half precision, and one for float32 and batches.

K is summed from its first element to its last, in one accumulator of float32 per element: never split, whatever the
number of rows. Operands may lie either way (a weight's rows, its transpose), and are read by bulk copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mmpack.ops.logprobs.linear.product_kernels import halves
from mmpack.ops.logprobs.linear.tiles import (
    INTERPRETED,
    Tiles,
    aligned,
    dot,
    place,
    programs_of,
    shape_arguments,
)
from mmpack.ops.products.tiles import is_few, tiles_for
from mmpack.ops.tf32 import allows_tf32

# Of the kernel for float32 and batches.
ROWS, COLUMNS, DEPTH = 64, 64, 32
SIDE = 32  # of each, on a CPU


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tiles: Tiles | None = None
) -> Tensor:
    """a [M, K] · b [K, N] + bias [N]; `tiles`: other ones than the chosen."""
    if a.dtype == torch.float32 or 0 in (*a.shape, b.shape[1]):
        return _general(a[None], b[None], bias, out_dtype)[0]
    (rows, depth), columns = a.shape, b.shape[1]
    tiles = tiles or tiles_for(rows, columns, a.device)
    left, a_by_depth = _laid_out(a)
    right, b_by_column = _laid_out(b)
    b_by_depth = not b_by_column
    per_row = 16 // out_dtype.itemsize
    out = a.new_empty(rows, -(-columns // per_row) * per_row, dtype=out_dtype)[:, :columns]
    programs = programs_of(a.device)
    few = is_few(tiles)
    grid = (
        triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns) if few else programs,
    )
    with torch.cuda.device_of(a):
        product_kernel[grid](
            _describe(left, [tiles.depth, tiles.rows] if a_by_depth else [tiles.rows, tiles.depth]),
            _describe(
                right, [tiles.depth, tiles.columns] if b_by_depth else [tiles.columns, tiles.depth]
            ),
            _describe(out, [tiles.rows, tiles.columns // 2]),
            bias,
            rows,
            columns,
            depth,
            A_BY_DEPTH=a_by_depth,
            B_BY_DEPTH=b_by_depth,
            PROGRAMS=0 if few else programs,
            **shape_arguments(tiles),
        )
    return out.contiguous()


def batched(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a [B, M, K] · b [B, K, N]."""
    return _general(a, b, None, out_dtype)


def _laid_out(x: Tensor) -> tuple[Tensor, bool]:
    """x or its transpose, as bulk copies read it; whether it is the transpose."""
    if x.stride(1) == 1 and x.stride(0):
        return aligned(x), False
    if x.stride(0) == 1 and x.stride(1):
        return aligned(x.T), True
    return aligned(x.contiguous()), False


def _general(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    (batch, rows, depth), columns = a.shape, b.shape[2]
    out = a.new_empty(batch, rows, columns, dtype=out_dtype)
    on_cpu = a.device.type == "cpu"
    tile_rows, tile_columns, tile_depth = (SIDE,) * 3 if on_cpu else (ROWS, COLUMNS, DEPTH)
    if out.numel():
        tf32 = a.dtype == torch.float32 and allows_tf32()
        grid = triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns), batch
        with torch.cuda.device_of(a):
            general_kernel[grid](
                a, b, out, bias, rows, columns, depth, *a.stride(), *b.stride(), *out.stride(),
                PRECISION="tf32" if tf32 else "ieee",
                ROWS=tile_rows, COLUMNS=tile_columns, DEPTH=tile_depth, num_warps=4, num_stages=2,
            )  # fmt: skip
    return out


def _describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, block)


# Specialised on `num_rows`, one row would be another kernel than two.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    a_desc,  # [ROWS, DEPTH], or [DEPTH, ROWS] where a lies by depth
    b_desc,  # [COLUMNS, DEPTH], or [DEPTH, COLUMNS]
    out_desc,  # [ROWS, COLUMNS / 2]
    bias_ptr,
    num_rows,
    num_columns,
    depth,
    A_BY_DEPTH: tl.constexpr,
    B_BY_DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,  # 0: one per tile
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    if PROGRAMS == 0:
        m, n = place(tl.program_id(0), tiles_m, tiles_n, GROUP)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            if A_BY_DEPTH:  # noqa: SIM108
                a = a_desc.load([k * DEPTH, m * ROWS]).T
            else:
                a = a_desc.load([m * ROWS, k * DEPTH])
            if B_BY_DEPTH:  # noqa: SIM108
                b = b_desc.load([k * DEPTH, n * COLUMNS])
            else:
                b = b_desc.load([n * COLUMNS, k * DEPTH]).T
            total = dot(a, b, total)
        store_tile(out_desc, bias_ptr, total, m, n, num_columns, ROWS, COLUMNS)
        return
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = place(tile, tiles_m, tiles_n, GROUP)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            if A_BY_DEPTH:  # noqa: SIM108  (Triton compiles a branch, not both)
                a = a_desc.load([k * DEPTH, m * ROWS]).T
            else:
                a = a_desc.load([m * ROWS, k * DEPTH])
            if B_BY_DEPTH:  # noqa: SIM108
                b = b_desc.load([k * DEPTH, n * COLUMNS])
            else:
                b = b_desc.load([n * COLUMNS, k * DEPTH]).T
            total = dot(a, b, total)
        store_tile(out_desc, bias_ptr, total, m, n, num_columns, ROWS, COLUMNS)


@triton.jit
def store_tile(
    out_desc, bias_ptr, total, m, n, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    if bias_ptr is not None:
        columns = n * COLUMNS + tl.arange(0, COLUMNS)
        bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    left, right = halves(total, ROWS, COLUMNS)
    out_desc.store([m * ROWS, n * COLUMNS], left.to(out_desc.dtype))
    out_desc.store([m * ROWS, n * COLUMNS + COLUMNS // 2], right.to(out_desc.dtype))


@triton.jit
def exact_dot(a, b, total, PRECISION: tl.constexpr):
    """`dot`, of float32 with the named precision."""
    if INTERPRETED:
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "a_batch", "b_batch", "out_batch"])
def general_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    depth,
    a_batch,
    a_row,
    a_depth,
    b_batch,
    b_depth,
    b_column,
    out_batch,
    out_row,
    out_column,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tiles_n = tl.cdiv(num_columns, COLUMNS)
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tile // tiles_n * ROWS + tl.arange(0, ROWS)
    columns = tile % tiles_n * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    a_rows = a_ptr + batch * a_batch + rows.to(tl.int64)[:, None] * a_row
    b_columns = b_ptr + batch * b_batch + columns.to(tl.int64)[None, :] * b_column
    rows_in, columns_in = rows < num_rows, columns < num_columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        at = (first + k).to(tl.int64)
        inside = first + k < depth
        a = tl.load(
            a_rows + at[None, :] * a_depth, mask=rows_in[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            b_columns + at[:, None] * b_depth, mask=inside[:, None] & columns_in[None, :], other=0.0
        )
        total = exact_dot(a, b, total, PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns_in, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out = (
        out_ptr + batch * out_batch + rows.to(tl.int64)[:, None] * out_row
        + columns.to(tl.int64)[None, :] * out_column
    )  # fmt: skip
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=rows_in[:, None] & columns_in[None, :])
