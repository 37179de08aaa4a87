"""Rows of [R, C] copied by an index, and summed back by its inverse: one launch each, no atomics.

A gather moves bytes, 16 at a time where rows and pointers are aligned so. A sum adds the entries of a row one after
the other, so its bits depend only on them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.rows.inverse import Inverse, inverse_index

TILE_BYTES = 8192
WARPS = 4
AT_ONCE = tl.constexpr(4)  # entries of a row that are read before they are added, after the first
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def tile(part, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Rows [BLOCK_ROWS] and columns [BLOCK_COLS] of tile `part`; the tiles of one row follow each other."""
    across = tl.cdiv(width, BLOCK_COLS)
    rows = part // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = part % across * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    return rows, columns


@triton.jit
def copy_tile(source, read, out, write, columns, width, live):
    """out[write] = source[read] for rows that are `live`; rows are `width` values long."""
    mask = live[:, None] & (columns < width)[None, :]
    values = tl.load(source + read.to(tl.int64)[:, None] * width + columns[None, :], mask=mask)
    where = write.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + where, values, mask=mask, cache_modifier=".cs")


@triton.jit
def entry_tile(values, through, order, at, stop, columns, width):
    """values[order[at]], or values[through[order[at]]] with `through`; 0 for rows where `at` is not below `stop`."""
    more = at < stop
    entry = tl.load(order + at, mask=more, other=0)
    if through is not None:
        entry = tl.load(through + entry, mask=more, other=0)
    where = entry.to(tl.int64)[:, None] * width + columns[None, :]
    mask = more[:, None] & (columns < width)[None, :]
    return tl.load(values + where, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def sum_tile(
    values, through, order, offsets, out, rows, num_rows, columns, width, SUM: tl.constexpr
):
    """out[r] = sum of the entries order[offsets[r] : offsets[r + 1]], one after the other; 0 if there is none."""
    live = rows < num_rows
    start = tl.load(offsets + rows, mask=live, other=0)
    stop = tl.load(offsets + rows + 1, mask=live, other=0)
    total = tl.zeros((rows.shape[0], columns.shape[0]), dtype=SUM)
    total += entry_tile(values, through, order, start, stop, columns, width).to(SUM)
    for first in range(1, tl.max(stop - start), AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            at = start + first + i
            total += entry_tile(values, through, order, at, stop, columns, width).to(SUM)
    where = rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = live[:, None] & (columns < width)[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=mask, cache_modifier=".cs")


# Counts differ from pack to pack: no kernel of their own for those that 16 divides.
@triton.jit(do_not_specialize=["count"])
def copy_kernel(
    source,
    read,
    out,
    write,
    count,
    units,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out[write] = source[read]; of the two one is None: all rows in order."""
    width = units * UNIT  # so that the compiler sees that rows are aligned
    rows, columns = tile(tl.program_id(0), width, BLOCK_ROWS, BLOCK_COLS)
    live = rows < count
    if read is not None:
        from_rows, to_rows = tl.load(read + rows, mask=live, other=0), rows
    else:
        from_rows, to_rows = rows, tl.load(write + rows, mask=live, other=0)
    copy_tile(source, from_rows, out, to_rows, columns, width, live)


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    values,
    order,
    offsets,
    out,
    num_rows,
    units,
    UNIT: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    width = units * UNIT
    rows, columns = tile(tl.program_id(0), width, BLOCK_ROWS, BLOCK_COLS)
    sum_tile(values, None, order, offsets, out, rows, num_rows, columns, width, SUM)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [R, ...], index [K] -> [K, ...]."""
    out = x.new_empty(len(index), *x.shape[1:])
    _copy(x, index.contiguous(), out, None)
    return out


def scatter_rows(out: Tensor, index: Tensor, values: Tensor) -> None:
    """out [R, ...] contiguous, index [K], values [K, ...]: out[index] = values."""
    _copy(values, None, out, index.contiguous())


def _copy(source: Tensor, read: Tensor | None, out: Tensor, write: Tensor | None) -> None:
    if source.numel() == 0 or out.numel() == 0:
        return
    (source, words), units, unit = as_words(source, out)
    count = len(words) if write is None else len(write)
    shape = tiling(count, units * unit, words.element_size())
    with torch.cuda.device_of(words):
        copy_kernel[shape.grid](source, read, words, write, count, units, UNIT=unit, **shape.blocks)


def sum_rows(values: Tensor, index: Tensor, inverse: Inverse | None, num_rows: int) -> Tensor:
    """Rows of values [K, ...] summed by `index`, in its order: [num_rows, ...]."""
    order, offsets = inverse or inverse_index(index, num_rows)
    out = values.new_empty(num_rows, *values.shape[1:])
    if out.numel() == 0:
        return out
    (flat, flat_out), units, unit = aligned(values, out)
    shape = tiling(num_rows, units * unit, values.element_size())
    with torch.cuda.device_of(values):
        sum_kernel[shape.grid](
            flat, order.contiguous(), offsets.contiguous(), flat_out, num_rows, units,
            UNIT=unit, SUM=sum_type(values.dtype), **shape.blocks,
        )  # fmt: skip
    return out


def aligned(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """Tensors [rows, ...] of one row size as contiguous [rows, C]; C as units of so many values.

    A unit is 16 bytes where the rows and the addresses of all allow it, else the largest power of two that does.
    """
    width = math.prod(tensors[0].shape[1:])
    flat = [t.reshape(len(t), width).contiguous() for t in tensors]
    size = flat[0].element_size()
    unit = math.gcd(16, width * size, *(t.data_ptr() for t in flat)) // size
    return flat, width // unit, unit


def as_words(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """`aligned`, with whole numbers of up to 8 bytes in place of the values."""
    flat, _, unit = aligned(*tensors)
    size = unit * flat[0].element_size()
    word = WORDS[min(size, 8)]
    unit = max(size // 8, 1)
    words = [t.view(word) for t in flat]
    return words, words[0].shape[1] // unit, unit


class Tiling(NamedTuple):
    """Programs that cover some rows, and what their kernel is launched with."""

    programs: int
    blocks: dict[str, int]

    @property
    def grid(self) -> tuple[int]:
        return (self.programs,)


def tiling(rows: int, width: int, size: int) -> Tiling:
    """Tiles of TILE_BYTES over `rows` rows of `width` values of `size` bytes."""
    values = TILE_BYTES // size
    columns = min(triton.next_power_of_2(max(width, 1)), values)
    high = values // columns
    count = triton.cdiv(rows, high) * triton.cdiv(width, columns)
    return Tiling(count, {"BLOCK_ROWS": high, "BLOCK_COLS": columns, "num_warps": WARPS})


def sum_type(dtype: torch.dtype) -> tl.dtype:
    """What values of `dtype` are summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
