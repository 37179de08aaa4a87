"""The convolution and its gradients in Triton: tiles of rows and channels, each row's inputs read from where they lie.

No atomics: a row gathers its own gradient from those that read it; the weight's is summed by program, then over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.rows.inverse import Inverse

BLOCK_ROWS = 32
BLOCK_COLS = 128
WEIGHT_PROGRAMS = 64  # partial sums of the weight's gradient, for each block of channels
WARPS = 4


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, silu: bool) -> Tensor:
    """x [T, C], weight [C, K], bias [C], previous [T, K-1 or more] -> [T, C]."""
    x, weight, previous = x.contiguous(), weight.contiguous(), previous.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    if out.numel():
        grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS))
        with torch.cuda.device_of(x):
            conv1d_kernel[grid](
                x, weight, x if bias is None else bias.contiguous(), previous, out,
                rows, width, previous.shape[1],
                TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu,
                BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, num_warps=WARPS,
            )  # fmt: skip
    return out


def conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor,
    readers: Inverse, silu: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients to x, weight and bias."""
    grad, x, weight, previous = (t.contiguous() for t in (grad, x, weight, previous))
    (rows, width), taps = x.shape, weight.shape[1]
    blocks, columns = triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS)
    programs = min(blocks, WEIGHT_PROGRAMS) if needs_weight else blocks
    # By tap, then the bias.
    partial = x.new_zeros(programs if needs_weight else 0, taps + 1, width, dtype=torch.float32)
    inner = torch.empty_like(x, dtype=torch.float32) if silu else grad
    to_x = torch.empty_like(x)
    with torch.cuda.device_of(x):
        if x.numel() and (silu or needs_weight):
            inner_kernel[(programs, columns)](
                grad, x, weight, x if bias is None else bias.contiguous(), previous, inner, partial,
                rows, width, previous.shape[1],
                TAPS=taps, TAPS_UP=triton.next_power_of_2(taps + 1), BIAS=bias is not None,
                SILU=silu, WEIGHT=needs_weight,
                BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, num_warps=WARPS,
            )  # fmt: skip
        if x.numel():
            conv1d_backward_kernel[(blocks, columns)](
                inner, weight, readers.order, readers.offsets, to_x,
                rows, width, previous.shape[1],
                TAPS=taps, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, num_warps=WARPS,
            )  # fmt: skip
    if not needs_weight:
        return to_x, None, None
    total = partial.sum(0)
    to_bias = None if bias is None else total[taps].to(bias.dtype, copy=True)
    return to_x, total[:taps].T.contiguous().to(weight.dtype), to_bias


@triton.jit
def tap_tile(
    x_ptr, previous_ptr, rows, columns, live, width, stride, AT: tl.constexpr
):  # fmt: skip
    """The rows AT + 1 before `rows` on their paths, zeros where there is none; AT = -1: the rows themselves."""
    where = rows
    if AT >= 0:
        where = tl.load(previous_ptr + rows.to(tl.int64) * stride + AT, mask=live, other=-1)
    there = live & (where >= 0)
    at = tl.where(there, where, 0).to(tl.int64)[:, None] * width + columns[None, :]
    mask = there[:, None] & (columns < width)[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def before_activation(
    x_ptr, weight_ptr, bias_ptr, previous_ptr, rows, columns, live, width, stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_COLS], summed from the oldest row to the row itself."""
    inside = columns < width
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + columns * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        moved = tap_tile(x_ptr, previous_ptr, rows, columns, live, width, stride, TAPS - 2 - tap)
        total += moved * weight[None, :]
    return total


# Counts differ from pack to pack: no kernel of their own for those that 16 divides.
@triton.jit(do_not_specialize=["num_rows"])
def conv1d_kernel(
    x_ptr, weight_ptr, bias_ptr, previous_ptr, out_ptr, num_rows, width, stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live = rows < num_rows
    out = before_activation(
        x_ptr, weight_ptr, bias_ptr, previous_ptr, rows, columns, live, width, stride,
        TAPS, BIAS, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    if SILU:
        out = out * tl.sigmoid(out)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = live[:, None] & (columns < width)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def inner_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    previous_ptr,
    inner_ptr,  # [T, C] float32: the gradient before the activation
    partial_ptr,  # [programs, TAPS + 1, C] float32
    num_rows,
    width,
    stride,
    TAPS: tl.constexpr,
    TAPS_UP: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = columns < width
    taps = tl.arange(0, TAPS_UP)
    sums = tl.zeros((TAPS_UP, BLOCK_COLS), tl.float32)
    for first in range(program * BLOCK_ROWS, num_rows, programs * BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        live = rows < num_rows
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        mask = live[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            out = before_activation(
                x_ptr, weight_ptr, bias_ptr, previous_ptr, rows, columns, live, width, stride,
                TAPS, BIAS, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            sigmoid = tl.sigmoid(out)
            grad = grad * sigmoid * (1 + out * (1 - sigmoid))
            tl.store(inner_ptr + at, grad, mask=mask)
        if WEIGHT:
            for tap in tl.static_range(TAPS):
                moved = tap_tile(
                    x_ptr, previous_ptr, rows, columns, live, width, stride, TAPS - 2 - tap
                )
                share = tl.sum(grad * moved, 0)
                sums += tl.where(taps[:, None] == tap, share[None, :], 0.0)
            sums += tl.where(taps[:, None] == TAPS, tl.sum(grad, 0)[None, :], 0.0)
    if WEIGHT:
        at = (program * (TAPS + 1) + taps)[:, None] * width + columns[None, :]
        tl.store(partial_ptr + at, sums, mask=(taps <= TAPS)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def conv1d_backward_kernel(
    inner_ptr, weight_ptr, order_ptr, offsets_ptr, to_x_ptr, num_rows, width, stride,
    TAPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Each row's own gradient, then those of the rows that read it, in their order."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live, inside = rows < num_rows, columns < width
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = live[:, None] & inside[None, :]
    own = tl.load(weight_ptr + columns * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(inner_ptr + at, mask=mask, other=0.0).to(tl.float32) * own[None, :]
    start = tl.load(offsets_ptr + rows, mask=live, other=0)
    count = tl.load(offsets_ptr + rows + 1, mask=live, other=0) - start
    for i in range(tl.max(count, 0)):
        more = i < count
        entry = tl.load(order_ptr + start + i, mask=more, other=0)
        tap = entry % stride
        reads = more & (tap < TAPS - 1)  # the plan's width may be more than K
        reader = (entry // stride).to(tl.int64)
        here = reads[:, None] & inside[None, :]
        grad = tl.load(inner_ptr + reader[:, None] * width + columns[None, :], mask=here, other=0.0)
        # A tap's weights don't depend on i, so the compiler loads them before; by `tap` it would load one an element.
        for k in tl.static_range(TAPS - 1):
            weight = tl.load(weight_ptr + columns * TAPS + TAPS - 2 - k, mask=inside, other=0.0)
            added = total + grad.to(tl.float32) * weight.to(tl.float32)[None, :]
            total = tl.where((reads & (tap == k))[:, None], added, total)
    tl.store(to_x_ptr + at, total.to(to_x_ptr.dtype.element_ty), mask=mask)
