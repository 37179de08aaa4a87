"""The convolution and its gradients in Triton: a program walks down some rows, with those before in registers.

No atomics: what a row's gradient gets from the rows right after it, a program has at hand. For rows that others read
too, `far_kernel` then writes the gradient again, whole. The weight's gradient is summed by program, then over programs.

The kernels that walk write sums of products as `fma`: left to the compiler, which product of a sum is rounded would
depend on what else a kernel makes, and gradients of x on whether the weight is trained.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.linear_attention.segment_plan import FarReaders

ROWS = 32  # of a program; UNROLL divides it, and BACKWARD_ROWS
BACKWARD_ROWS = 128  # more: the weight's gradient has a partial sum for each program
UNROLL = 4  # rows whose loads are under way together
BLOCK_COLS = 512  # four a thread: with more, registers leave too few programs on a multiprocessor
FAR_COLS = 128
FAR_READERS = 8
WARPS = 4


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, silu: bool) -> Tensor:
    """x [T, C], weight [C, K], bias [C], previous [T, K-1 or more] -> [T, C]."""
    x, weight, previous = x.contiguous(), weight.contiguous(), previous.contiguous()
    rows, width = x.shape
    out = x.new_empty(x.shape)
    if out.numel():
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, BLOCK_COLS))
        with torch.cuda.device_of(x):
            conv1d_kernel[grid](
                x, weight, x if bias is None else bias.contiguous(), previous, out,
                rows, width, previous.shape[1],
                TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu,
                ROWS=ROWS, UNROLL=UNROLL, BLOCK_COLS=BLOCK_COLS, num_warps=WARPS,
            )  # fmt: skip
    return out


def conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, far: FarReaders,
    silu: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients to x, weight and bias; None for the last two unless `needs_weight`."""
    grad, x, weight, previous = (t.contiguous() for t in (grad, x, weight, previous))
    (rows, width), taps = x.shape, weight.shape[1]
    blocks = triton.cdiv(rows, BACKWARD_ROWS)
    # By tap, then the bias.
    shape = (blocks if needs_weight else 0, taps + 1, width)
    partial = x.new_empty(shape, dtype=torch.float32)
    to_x = x.new_empty(x.shape)
    if x.numel():
        given = (grad, x, weight, x if bias is None else bias.contiguous(), previous)
        counts = (rows, width, previous.shape[1])
        kind = {"TAPS": taps, "BIAS": bias is not None, "SILU": silu}
        with torch.cuda.device_of(x):
            conv1d_backward_kernel[(blocks, triton.cdiv(width, BLOCK_COLS))](
                *given, to_x, partial, *counts, **kind, WEIGHT=needs_weight,
                ROWS=BACKWARD_ROWS, EARLY=triton.cdiv(taps - 1, UNROLL) * UNROLL, UNROLL=UNROLL,
                BLOCK_COLS=BLOCK_COLS, num_warps=WARPS,
            )  # fmt: skip
            if len(far.rows):
                far_kernel[(len(far.rows), triton.cdiv(width, FAR_COLS))](
                    *given, *far, to_x, *counts, **kind,
                    READERS=FAR_READERS, BLOCK_COLS=FAR_COLS, num_warps=WARPS,
                )  # fmt: skip
    if not needs_weight:
        return to_x, None, None
    total = partial.sum(0)
    to_bias = None if bias is None else total[taps].to(bias.dtype, copy=True)
    return to_x, total[:taps].T.contiguous().to(weight.dtype), to_bias


@triton.jit
def row_of(x_ptr, row, columns, there, width):
    """One row [BLOCK_COLS] in float32, zeros where it is not `there`."""
    return tl.load(x_ptr + row.to(tl.int64) * width + columns, mask=there, other=0.0).to(tl.float32)


@triton.jit
def is_next(previous_ptr, row, live, stride, TAPS: tl.constexpr):
    """Whether the row's window is that of the row before it in the pack, moved by one."""
    if TAPS == 1:  # no row is read but the row itself
        return live
    return tl.load(previous_ptr + row.to(tl.int64) * stride, mask=live, other=-2) == row - 1


@triton.jit
def taps_of(weight_ptr, columns, inside, TAPS: tl.constexpr):
    """The weights [BLOCK_COLS] of each distance, that of the row itself first."""
    out = ()
    for back in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + columns * TAPS + TAPS - 1 - back, mask=inside, other=0.0)
        out = out + (weight.to(tl.float32),)
    return out


@triton.jit
def window_of(
    x_ptr, previous_ptr, row, columns, inside, live, width, stride, TAPS: tl.constexpr
):  # fmt: skip
    """The row, and the TAPS - 1 before it on its path; zeros where there is none."""
    out = (row_of(x_ptr, row, columns, inside & live, width),)
    for back in tl.static_range(TAPS - 1):
        before = tl.load(previous_ptr + row.to(tl.int64) * stride + back, mask=live, other=-1)
        out = out + (row_of(x_ptr, before, columns, inside & (before >= 0), width),)
    return out


@triton.jit
def zeros_of(COUNT: tl.constexpr, BLOCK_COLS: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros((BLOCK_COLS,), tl.float32),)
    return out


@triton.jit
def moved(new, others, COUNT: tl.constexpr):
    """COUNT of them: `new`, then the first of the others."""
    out = (new,)
    for i in tl.static_range(COUNT - 1):
        out = out + (others[i],)
    return out


@triton.jit
def before_activation(window, weights, bias, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """The bias, then the products from the oldest row's to the row's own."""
    total = window[TAPS - 1] * weights[TAPS - 1]
    if BIAS:
        total = tl.fma(window[TAPS - 1], weights[TAPS - 1], bias)
    for tap in tl.static_range(1, TAPS):
        total = tl.fma(window[TAPS - 1 - tap], weights[TAPS - 1 - tap], total)
    return total


@triton.jit
def before_silu(grad, out):
    """The gradient to silu's input `out`."""
    sigmoid = tl.sigmoid(out)
    return grad * sigmoid * tl.fma(out, 1 - sigmoid, 1.0)


# Counts differ from pack to pack: no kernel of their own for those that 16 divides.
@triton.jit(do_not_specialize=["num_rows"])
def conv1d_kernel(
    x_ptr, weight_ptr, bias_ptr, previous_ptr, out_ptr, num_rows, width, stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    columns = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = columns < width
    weights = taps_of(weight_ptr, columns, inside, TAPS)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    window = zeros_of(TAPS, BLOCK_COLS)
    for start in range(first, first + ROWS, UNROLL):
        own, follows = (), ()
        for i in tl.static_range(UNROLL):
            row = start + i
            live = row < num_rows
            own = own + (row_of(x_ptr, row, columns, inside & live, width),)
            after = live & (row > first)
            follows = follows + (is_next(previous_ptr, row, after, stride, TAPS),)
        for i in tl.static_range(UNROLL):
            row = start + i
            live = row < num_rows
            if follows[i]:
                window = moved(own[i], window, TAPS)
            else:
                window = window_of(
                    x_ptr, previous_ptr, row, columns, inside, live, width, stride, TAPS
                )
            out = before_activation(window, weights, bias, TAPS, BIAS)
            if SILU:
                out = out * tl.sigmoid(out)
            to = out_ptr + row.to(tl.int64) * width + columns
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside & live)


@triton.jit
def moved_up(window, oldest, TAPS: tl.constexpr):
    """The window of the row before: without its first, and with its oldest row."""
    out = ()
    for i in tl.static_range(1, TAPS):
        out = out + (window[i],)
    return out + (oldest,)


@triton.jit
def added(sums, inner, window, TAPS: tl.constexpr):
    out = ()
    for i in tl.static_range(TAPS):
        out = out + (tl.fma(inner, window[i], sums[i]),)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def conv1d_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    previous_ptr,
    to_x_ptr,
    partial_ptr,  # [programs, TAPS + 1, C] float32
    num_rows,
    width,
    stride,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,  # TAPS - 1 or more, which UNROLL divides
    UNROLL: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """From the last row up. It begins EARLY rows below its own: its last rows get gradients from those."""
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = columns < width
    weights = taps_of(weight_ptr, columns, inside, TAPS)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    first, end = program * ROWS, (program + 1) * ROWS
    window = zeros_of(TAPS, BLOCK_COLS)  # the row, and those before it
    after = zeros_of(TAPS, BLOCK_COLS)  # gradients of the rows that read it, at distances 1, 2, …
    sums = zeros_of(TAPS, BLOCK_COLS)
    bias_sum = tl.zeros((BLOCK_COLS,), tl.float32)
    chained = program < 0  # whether the row after this one reads it; False, as a tensor
    for start in range(end + EARLY, first, -UNROLL):
        oldest, grads, reads = (), (), ()
        for i in tl.static_range(UNROLL):
            row = start - 1 - i
            live = row < num_rows
            before = row
            if TAPS > 1:
                at = previous_ptr + row.to(tl.int64) * stride + TAPS - 2
                before = tl.load(at, mask=live, other=-1)
            there = inside & live & (before >= 0)
            oldest = oldest + (row_of(x_ptr, before, columns, there, width),)
            grads = grads + (row_of(grad_ptr, row, columns, inside & live, width),)
            reads = reads + (is_next(previous_ptr, row, live, stride, TAPS),)
        for i in tl.static_range(UNROLL):
            row = start - 1 - i
            live = row < num_rows
            if chained:
                window = moved_up(window, oldest[i], TAPS)
            else:
                window = window_of(
                    x_ptr, previous_ptr, row, columns, inside, live, width, stride, TAPS
                )
            inner = grads[i]
            if SILU:
                inner = before_silu(inner, before_activation(window, weights, bias, TAPS, BIAS))
            if row < end:
                to = inner * weights[0]
                for back in tl.static_range(1, TAPS):
                    to = tl.fma(after[back - 1], weights[back], to)
                place = to_x_ptr + row.to(tl.int64) * width + columns
                tl.store(place, to.to(to_x_ptr.dtype.element_ty), mask=inside & live)
                if WEIGHT:
                    sums = added(sums, inner, window, TAPS)
                    bias_sum += inner
            chained = reads[i]
            if chained:  # noqa: SIM108 (Triton has no such expression for tuples)
                after = moved(inner, after, TAPS)
            else:
                after = zeros_of(TAPS, BLOCK_COLS)
    if WEIGHT:
        at = partial_ptr + program.to(tl.int64) * (TAPS + 1) * width + columns
        for tap in tl.static_range(TAPS):
            tl.store(at + tap * width, sums[TAPS - 1 - tap], mask=inside)
        tl.store(at + TAPS * width, bias_sum, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def far_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    previous_ptr,
    rows_ptr,  # [F]
    offsets_ptr,  # [F+1]
    readers_ptr,
    to_x_ptr,
    num_rows,
    width,
    stride,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    READERS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The whole gradient of a row that rows elsewhere read: READERS of them at a time, in their order."""
    far = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = columns < width
    row = tl.load(rows_ptr + far)
    first, end = tl.load(offsets_ptr + far), tl.load(offsets_ptr + far + 1)
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(first, end, READERS):
        at = start + tl.arange(0, READERS)
        entry = tl.load(readers_ptr + at, mask=at < end, other=0)
        reader, back = entry // (stride + 1), entry % (stride + 1)
        there = (at < end) & (back < TAPS)  # the plan's width may be more than K
        tile = there[:, None] & inside[None, :]
        place = reader.to(tl.int64)[:, None] * width + columns[None, :]
        inner = tl.load(grad_ptr + place, mask=tile, other=0.0).to(tl.float32)
        if SILU:
            out = tl.zeros((READERS, BLOCK_COLS), tl.float32)
            if BIAS:
                out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(TAPS):
                before = reader
                if tap < TAPS - 1:
                    to = previous_ptr + reader.to(tl.int64) * stride + TAPS - 2 - tap
                    before = tl.load(to, mask=there, other=-1)
                x = tl.load(
                    x_ptr + before.to(tl.int64)[:, None] * width + columns[None, :],
                    mask=tile & (before >= 0)[:, None],
                    other=0.0,
                )
                weight = tl.load(weight_ptr + columns * TAPS + tap, mask=inside, other=0.0)
                out += x.to(tl.float32) * weight.to(tl.float32)[None, :]
            inner = before_silu(inner, out)
        of_weight = weight_ptr + columns[None, :] * TAPS + TAPS - 1 - back[:, None]
        weight = tl.load(of_weight, mask=tile, other=0.0).to(tl.float32)
        total += tl.sum(inner * weight, 0)
    at = to_x_ptr + row.to(tl.int64) * width + columns
    tl.store(at, total.to(to_x_ptr.dtype.element_ty), mask=inside)
