"""Triton kernels that gather rows: entries' products of two rows, and sums of rows over sorted runs of entries.

A long run is cut into pieces of PIECE entries from its start. Their sums are added in their order by a second kernel,
so bits depend on the run alone. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmpack.ops.logprobs.linear.tiles import cap

PIECE = 256  # entries that one program adds up
COLUMNS = 1024
AT_ONCE = 4  # rows that are read before they are added
WARPS = 4
ENTRIES = 8  # of one program of the products
DEPTH = 512


@triton.jit(do_not_specialize=["count"])
def dots_kernel(
    hidden,
    hidden_row_stride,
    hidden_column_stride,
    weight,
    weight_row_stride,
    weight_column_stride,
    bias,
    rows,
    columns,
    out,
    count,
    vocab,
    width,
    softcap,
    SOFTCAP: tl.constexpr,
    ENTRIES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[m] = hidden[rows[m]] · weight[columns[m]] + bias[columns[m]]; NaN for columns outside [0, V).

    Entries of one token lie side by side and share a row of hidden, which only the first reads from memory.
    """
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < count
    column = tl.load(columns + entries, mask=inside, other=-1).to(tl.int64)
    row = tl.load(rows + entries, mask=inside, other=0).to(tl.int64)
    here = (column >= 0) & (column < vocab)
    a_row = hidden + row[:, None] * hidden_row_stride
    b_row = weight + column[:, None] * weight_row_stride
    total = tl.zeros((ENTRIES, DEPTH), tl.float32)
    for first in range(0, width, DEPTH):
        k = (first + tl.arange(0, DEPTH)).to(tl.int64)
        mask = here[:, None] & (k < width)[None, :]
        a = tl.load(a_row + k[None, :] * hidden_column_stride, mask=mask, other=0.0)
        b = tl.load(b_row + k[None, :] * weight_column_stride, mask=mask, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    z = tl.sum(total, 1)
    if bias is not None:
        z += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    if SOFTCAP:
        z = cap(z, softcap)
    tl.store(out + entries, tl.where(here, z, float("nan")), mask=inside)


@triton.jit
def piece_sum(
    source, row_stride, column_stride, index, scale, order, first, last, columns, width,
    AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum [COLUMNS] over places first to last of the order, a few rows at a time."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, last, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        inside = at < last
        entry = at
        if order is not None:
            entry = tl.load(order + at, mask=inside, other=0)
        factor = tl.load(scale + entry, mask=inside, other=0.0)
        live = factor != 0.0  # other rows may hold anything
        row = tl.load(index + entry, mask=live, other=0).to(tl.int64)
        where = row[:, None] * row_stride + columns[None, :] * column_stride
        mask = live[:, None] & (columns < width)[None, :]
        values = tl.load(source + where, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(factor[:, None] * values, 0)
    return total


@triton.jit
def sum_runs_kernel(
    out,
    places,
    source,
    row_stride,
    column_stride,
    index,
    scale,
    order,
    offsets,
    width,
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Runs of one piece, and zeros for empty ones."""
    run = tl.program_id(0).to(tl.int64)
    first, last = tl.load(offsets + run), tl.load(offsets + run + 1)
    if last - first > PIECE:
        return
    place = run
    if places is not None:
        place = tl.load(places + run).to(tl.int64)
    for column in range(0, width, COLUMNS):
        columns = (column + tl.arange(0, COLUMNS)).to(tl.int64)
        total = piece_sum(
            source, row_stride, column_stride, index, scale, order, first, last, columns, width,
            AT_ONCE, COLUMNS,
        )  # fmt: skip
        tl.store(
            out + place * width + columns, total.to(out.dtype.element_ty), mask=columns < width
        )


@triton.jit
def long_run(slot, slot_runs, offsets, num_runs, PIECE: tl.constexpr):
    """The run that place slot · PIECE lies in: its bounds, the first slot in it, its slots, its pieces.

    Slots and pieces are cut at different places, so a run has as many slots as pieces, or one less. No pieces: the
    run is none, or not long.
    """
    run = tl.load(slot_runs + slot).to(tl.int64)
    there = run < num_runs
    first = tl.load(offsets + run, mask=there, other=0).to(tl.int64)
    last = tl.load(offsets + run + 1, mask=there, other=0).to(tl.int64)
    base = tl.cdiv(first, PIECE)
    slots = tl.cdiv(last, PIECE) - base
    pieces = tl.where(last - first > PIECE, tl.cdiv(last - first, PIECE), 0)
    return run, first, last, base, slots, pieces


@triton.jit(do_not_specialize=["num_runs"])
def sum_pieces_kernel(
    partial,
    slot_runs,
    source,
    row_stride,
    column_stride,
    index,
    scale,
    order,
    offsets,
    num_runs,
    width,
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """partial[2 · slot] = the slot's piece of a long run; partial[2 · slot + 1] = the last piece, which has no slot."""
    slot = tl.program_id(0)
    _, first, last, base, slots, pieces = long_run(slot, slot_runs, offsets, num_runs, PIECE)
    mine = slot - base
    if (pieces == 0) | (mine >= slots):
        return
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    end = tl.where(mine == slots - 1, pieces, mine + 1)
    for piece in range(mine, end):
        start = first + piece * PIECE
        total = piece_sum(
            source, row_stride, column_stride, index, scale, order, start,
            tl.minimum(start + PIECE, last), columns, width, AT_ONCE, COLUMNS,
        )  # fmt: skip
        to = (2 * slot.to(tl.int64) + piece - mine) * width
        tl.store(partial + to + columns, total, mask=columns < width)


@triton.jit(do_not_specialize=["num_runs"])
def join_pieces_kernel(
    out,
    places,
    partial,
    slot_runs,
    offsets,
    num_runs,
    width,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The pieces of each long run added up in their order, by the program of its first slot."""
    slot = tl.program_id(0)
    run, _, _, base, slots, pieces = long_run(slot, slot_runs, offsets, num_runs, PIECE)
    if (pieces == 0) | (slot != base):
        return
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for piece in range(pieces):
        own = tl.minimum(piece, slots - 1)
        row = 2 * (base + own) + piece - own
        total += tl.load(partial + row * width + columns, mask=columns < width, other=0.0)
    place = run
    if places is not None:
        place = tl.load(places + run).to(tl.int64)
    tl.store(out + place * width + columns, total.to(out.dtype.element_ty), mask=columns < width)
