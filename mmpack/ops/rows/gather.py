"""Rows of a tensor by an index, with a gradient that is the same bits every time.

The backward adds the gradients of a row that is read several times in the order of the index, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import LIBRARY, define_op, refuse_transforms
from mmpack.ops.inputs import check_index
from mmpack.ops.namespace import NAMESPACE
from mmpack.ops.records import Size
from mmpack.ops.rows import GATHER_ROWS, SUM_ROWS
from mmpack.ops.rows.inverse import Inverse


def gather_rows(x: Tensor, index: Tensor, *, inverse: Inverse | None = None) -> Tensor:
    """x[index]: [R, …] of any dtype and [K] (int32 or int64) -> [K, …].

    Args: `inverse`: `inverse_index(index, R)`, where it was made before; else the backward makes it by one stable sort.

    The gradient to x is summed in float32 (float64 for float64) in the order of the index and rounded once; rows that
    are not read get exactly 0. Raises ArgumentError for wrong shapes, and on the CPU for an index out of range. On
    a GPU the index is not read, because that would wait for the GPU.

    Example:
        >>> import torch
        >>> from mmpack.ops.rows.gather import gather_rows
        >>> gather_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 1])).tolist()
        [[3, 4], [3, 4]]
    """
    if x.ndim == 0:
        raise ArgumentError("gather_rows: x is a single number. Fix: pass rows, [R, …]")
    check_index("gather_rows", "index", index, device=x.device)
    if inverse is not None and inverse.offsets.shape[0] != x.shape[0] + 1:
        raise ArgumentError(
            f"gather_rows: the inverse is for {len(inverse.offsets) - 1} rows, but x has {len(x)}. "
            "Fix: pass inverse_index(index, len(x))"
        )
    refuse_transforms("gather_rows", x)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return gather_op(x, index)
    order, offsets = (None, None) if inverse is None else inverse
    # Traced as one op: torch keeps no compiled graph on disk that holds an autograd.Function.
    run = _traced_op if torch.compiler.is_compiling() else _Gather.apply
    return run(x, index, order, offsets)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    check_index("gather_rows", "index", index, len(x))
    return implementation(GATHER_ROWS, x.device).gather_rows(x, index)


def _sum(
    values: Tensor, index: Tensor, order: Tensor | None, offsets: Tensor | None, num_rows: int
) -> Tensor:
    inverse = None if order is None or offsets is None else Inverse(order, offsets)
    return implementation(SUM_ROWS, values.device).sum_rows(values, index, inverse, num_rows)


def _gather_fake(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


def _sum_fake(
    values: Tensor, index: Tensor, order: Tensor | None, offsets: Tensor | None, num_rows: Size
) -> Tensor:
    return values.new_empty(num_rows, *values.shape[1:])


def _traced_fake(x: Tensor, index: Tensor, order: Tensor | None, offsets: Tensor | None) -> Tensor:
    return _gather_fake(x, index)


gather_op = define_op("gather_rows", _gather, _gather_fake)
sum_op = define_op("sum_rows", _sum, _sum_fake)
_traced_op = define_op(
    "gather_rows_traced", lambda x, index, order, offsets: _gather(x, index), _traced_fake
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_rows = inputs[0].shape[0]
    ctx.save_for_backward(*inputs[1:])


def _traced_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sum_op(grad, *ctx.saved_tensors, ctx.num_rows), None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::gather_rows_traced", _traced_backward, setup_context=_keep, lib=LIBRARY
)


class _Gather(torch.autograd.Function):
    """x, index, order and offsets of its inverse; its transpose is _Sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, *inverse: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, *inverse)
        ctx.num_rows = x.shape[0]
        return gather_op(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grad, *ctx.saved_tensors, ctx.num_rows), None, None, None


class _Sum(torch.autograd.Function):
    """values, index, order and offsets of its inverse, number of rows; its transpose is _Gather."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, *places: Any) -> Tensor:
        ctx.save_for_backward(*places[:3])
        return sum_op(values, *places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Gather.apply(grad, *ctx.saved_tensors), None, None, None, None
