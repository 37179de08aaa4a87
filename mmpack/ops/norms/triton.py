"""Row sums and RMSNorm in Triton: a program per row, in blocks of a size that follows from the row's length.

Inputs are contiguous and 16-byte aligned, and the number of rows is no constant of the compiler: so the layout of a
sum, and with it its order, is the same in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8192  # elements of a block
# Of the gradient to weight: as many partial sums at most, of rows of NARROW elements; more of narrower rows.
WEIGHT_PROGRAMS = 264
NARROW = 4096


def row_sum(x: Tensor, out_dtype: torch.dtype, scale: float) -> Tensor:
    """scale · sum of x [R, N] -> [R]."""
    x = _laid_out(x)
    rows, width = x.shape
    out = x.new_empty(rows, dtype=out_dtype)
    if rows:
        block, warps = _block(width)
        with torch.cuda.device_of(x):
            row_sum_kernel[(rows,)](x, out, width, scale, BLOCK=block, num_warps=warps)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [R, N], weight [N] -> [R, N]."""
    x, weight = _laid_out(x), _laid_out(weight)
    rows, width = x.shape
    out = x.new_empty(rows, width, dtype=torch.promote_types(x.dtype, weight.dtype))
    if out.numel():
        block, warps = _block(width)
        with torch.cuda.device_of(x):
            rms_norm_kernel[(rows,)](
                x, weight, out, width, 1 / width, eps, BLOCK=block, num_warps=warps
            )
    return out


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients to x and weight; that to weight is summed by program, then over the programs."""
    grad, x, weight = _laid_out(grad), _laid_out(x), _laid_out(weight)
    rows, width = x.shape
    to_x = torch.empty_like(x)
    programs = max(min(rows, WEIGHT_PROGRAMS * max(NARROW // width, 1)), 1)
    partial = torch.zeros(programs if needs_weight else 0, width, device=x.device)
    if to_x.numel():
        block, warps = _block(width)
        with torch.cuda.device_of(x):
            rms_norm_backward_kernel[(programs,)](
                grad, x, weight, to_x, partial, rows, width, 1 / width, eps,
                WEIGHT=needs_weight, BLOCK=block,
                WHOLE=width <= block, num_warps=warps,
            )  # fmt: skip
    return to_x, partial.sum(0).to(weight.dtype) if needs_weight else None


def _laid_out(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _block(width: int) -> tuple[int, int]:
    """Elements and warps."""
    block = min(max(triton.next_power_of_2(width), 16), MOST)
    return block, min(max(block // 512, 1), 8)


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, width, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, (tl.sum(total, 0) * scale).to(out_ptr.dtype.element_ty))


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, share, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) * share + eps)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0)
        weight = tl.load(weight_ptr + at, mask=at < width, other=0.0)
        normed = (x.to(tl.float32) * scale).to(x.dtype)
        out = weight.to(tl.float32) * normed.to(tl.float32)
        tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    to_x_ptr,
    partial_ptr,  # [programs, width] float32
    rows,
    width,
    share,
    eps,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # a block holds a row
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    if WHOLE:
        at = tl.arange(0, BLOCK)
        inside = at < width
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        to_weight = tl.zeros((BLOCK,), tl.float32)
        for row in range(program, rows, programs):
            here = tl.cast(row, tl.int64) * width + at
            rounded = tl.load(x_ptr + here, mask=inside, other=0.0)
            grad = tl.load(grad_ptr + here, mask=inside, other=0.0).to(tl.float32)
            x = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 0) * share + eps)
            normed, along = x * scale, grad * weight
            mean = tl.sum(along * normed, 0) * share
            to_x = scale * (along - normed * mean)
            tl.store(to_x_ptr + here, to_x.to(to_x_ptr.dtype.element_ty), mask=inside)
            if WEIGHT:
                to_weight += grad * normed.to(rounded.dtype).to(tl.float32)
        if WEIGHT:
            tl.store(partial_ptr + program * width + at, to_weight, mask=inside)
    else:
        for row in range(program, rows, programs):
            start = tl.cast(row, tl.int64) * width
            squares = tl.zeros((BLOCK,), tl.float32)
            products = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, width, BLOCK):
                at = first + tl.arange(0, BLOCK)
                x = tl.load(x_ptr + start + at, mask=at < width, other=0.0).to(tl.float32)
                grad = tl.load(grad_ptr + start + at, mask=at < width, other=0.0).to(tl.float32)
                weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32)
                squares += x * x
                products += grad * weight * x
            scale = tl.rsqrt(tl.sum(squares, 0) * share + eps)
            mean = tl.sum(products, 0) * scale * share
            for first in range(0, width, BLOCK):
                at = first + tl.arange(0, BLOCK)
                inside = at < width
                rounded = tl.load(x_ptr + start + at, mask=inside, other=0.0)
                grad = tl.load(grad_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
                weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
                normed = rounded.to(tl.float32) * scale
                to_x = scale * (grad * weight - normed * mean)
                tl.store(to_x_ptr + start + at, to_x.to(to_x_ptr.dtype.element_ty), mask=inside)
                if WEIGHT:
                    here = partial_ptr + program * width + at
                    before = tl.load(here, mask=inside, other=0.0)
                    more = grad * normed.to(rounded.dtype).to(tl.float32)
                    tl.store(here, before + more, mask=inside)
