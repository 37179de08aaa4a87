"""Products over ranks that hold parts of the weight: the same bits on 1, 2, 4 and 8 ranks, forward and backward.

What is summed over ranks is summed in `parts` blocks of fixed size, each in float32, by one binary tree: neighbours
first, then neighbouring pairs. Ranks that hold neighbouring parts sum theirs by the lower levels, and every rank sums
the levels above them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.ops.backend import choose
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.products import PRODUCT
from mmpack.ops.products.product import FLOATS, multiply

PARTS = 8


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Any = None, parts: int = PARTS
) -> Tensor:
    """x · weightᵀ + bias, K split over the ranks: x [..., K / ranks], weight [N, K / ranks], bias [N] -> [..., N].

    Every rank gets the whole result, and the gradient to its x and weight; the gradient to the result must be the
    same on all ranks, as it is where they compute alike. One dtype for all: bfloat16, float16, float32 or float64.
    `parts`: blocks that K is summed in, a power of two that the number of ranks divides and that divides K; other parts
    give other bits.
    Raises ArgumentError for shapes, dtypes, parts and groups that don't fit.

    Example:
        >>> import torch
        >>> from mmpack.invariant import row_parallel
        >>> row_parallel(torch.ones(1, 8), torch.ones(2, 8)).tolist()
        [[8.0, 8.0]]
    """
    ranks = _check("row_parallel", x, weight, bias, group, parts, split=1)
    made: Tensor = _RowParallel.apply(x, weight, bias, group, parts // ranks, ranks)
    return made


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Any = None, parts: int = PARTS
) -> Tensor:
    """This rank's columns of x · weightᵀ + bias: x [..., K], the same on all ranks, weight [N / ranks, K] ->
    [..., N / ranks], in the dtype of x.

    The gradient to x is summed over the ranks by the tree, in `parts` blocks of N: the same on all of them.
    Raises as `row_parallel` does.
    """
    ranks = _check("column_parallel", x, weight, bias, group, parts, split=0)
    made: Tensor = _ColumnParallel.apply(x, weight, bias, group, parts // ranks, ranks)
    return made


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Any,
        blocks: int,
        ranks: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        total = _summed(x.reshape(-1, x.shape[-1]), weight.t(), blocks)
        total = _reduced(total, group, ranks)
        if bias is not None:
            total = total + bias.to(total.dtype)
        return total.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        to_x = _by_columns(rows, weight, None, ctx.blocks).view(x.shape)
        to_weight, to_bias = _to_weights(ctx, rows, x)
        return to_x, to_weight, to_bias, None, None, None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Any,
        blocks: int,
        ranks: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.blocks, ctx.ranks = group, blocks, ranks
        rows = x.reshape(-1, x.shape[-1])
        return _by_columns(rows, weight.t(), bias, blocks).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        total = _reduced(_summed(rows, weight, ctx.blocks), ctx.group, ctx.ranks)
        to_weight, to_bias = _to_weights(ctx, rows, x)
        return total.to(x.dtype).view(x.shape), to_weight, to_bias, None, None, None


def _summed(a: Tensor, b: Tensor, blocks: int) -> Tensor:
    """a [M, K] · b [K, N] in float32, or float64: K in blocks, summed by the tree, of which log2(blocks) are held."""
    size, dtype = a.shape[1] // blocks, torch.promote_types(a.dtype, torch.float32)

    def tree(first: int, count: int) -> Tensor:
        if count == 1:
            part = slice(first * size, (first + 1) * size)
            return multiply(a[:, part], b[part], None, dtype)
        half = count // 2
        return tree(first, half).add_(tree(first + half, half))

    return tree(0, blocks)


def _by_columns(a: Tensor, b: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
    """a · b + bias. In plain torch by blocks of columns: there a column's bits depend on how many its block has."""
    run: Callable[..., Tensor] = multiply
    if choose(PRODUCT, a.device, a.dtype) != "torch":
        return run(a, b, bias, a.dtype)
    size = b.shape[1] // blocks
    parts = [slice(i * size, (i + 1) * size) for i in range(blocks)]
    return torch.cat(
        [run(a, b[:, p], None if bias is None else bias[p], a.dtype) for p in parts], 1
    )


def _to_weights(ctx: Any, grad: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    to_weight = to_bias = None
    if ctx.needs_input_grad[1]:
        to_weight = multiply(grad.t(), x.reshape(-1, x.shape[-1]), None, grad.dtype)
    if ctx.needs_input_grad[2]:
        to_bias = grad.sum(0)
    return to_weight, to_bias


def _check(
    what: str, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, parts: int, split: int
) -> int:
    """How many ranks; `split`: the dimension of weight that they split."""
    check_are_tensors(what, ("bias",), x=x, weight=weight, bias=bias)
    check_whole(what, "parts", parts)
    ranks = _ranks_of(what, group)
    tensors = [t for t in (x, weight, bias) if t is not None]
    if x.dtype not in FLOATS or any((t.dtype, t.device) != (x.dtype, x.device) for t in tensors):
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise ArgumentError(
            f"{what}: x, weight and bias are {found}. "
            "Fix: use one floating dtype of 16 bits or more, and one device, for all"
        )
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"{what}: x has shape {list(x.shape)}, weight {list(weight.shape)}, expected [..., K] and [N, K] of this "
            "rank. Fix: pass this rank's part of both x and weight"
        )
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ArgumentError(
            f"{what}: bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]. Fix: pass one per row of weight"
        )
    whole = weight.shape[split] * ranks
    if not _is_power_of_two(parts) or parts % ranks or whole % parts:
        raise ArgumentError(
            f"{what}: parts is {parts}, with {ranks} ranks and {whole} to split. "
            f"Fix: pass a power of two that is a multiple of the ranks and divides {whole}"
        )
    return ranks


def tree_sum(parts: Tensor) -> Tensor:
    """parts [P, ...] -> [...], of any dtype, which the sum keeps. P is a power of two. Differentiable.

    Raises ArgumentError for another number of parts.

    Example:
        >>> import torch
        >>> from mmpack.invariant.parallel import tree_sum
        >>> tree_sum(torch.tensor([1.0, 2.0, 3.0, 4.0])).item()
        10.0
    """
    check_are_tensors("tree_sum", parts=parts)
    if parts.ndim == 0 or not _is_power_of_two(len(parts)):
        raise ArgumentError(
            f"tree_sum: parts has shape {list(parts.shape)}, expected a power of two of parts, stacked. "
            "Fix: pass torch.stack(parts)"
        )
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def tree_all_reduce(x: Tensor, group: Any = None) -> Tensor:
    """Sum of each rank's x [...] over the ranks of `group`, by the tree over them: the same bits on all. No gradient.

    x has any dtype; the sum has the same. The number of ranks is a power of two. Memory: x of every rank at once.
    `group`: a ProcessGroup; None: this process alone. Raises ArgumentError for another number of ranks, or if `group`
    is not a ProcessGroup.
    """
    check_are_tensors("tree_all_reduce", x=x)
    return _reduced(x, group, _ranks_of("tree_all_reduce", group))


def _reduced(x: Tensor, group: Any, ranks: int) -> Tensor:
    if ranks == 1:
        return x
    x = x.detach().contiguous()
    gathered = x.new_empty(ranks, *x.shape)
    torch.distributed.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=group)
    return tree_sum(gathered)


def _ranks_of(what: str, group: Any) -> int:
    """How many ranks. Raises ArgumentError, as `what`, for what is no group of 2^n ranks."""
    if group is None:
        return 1
    distributed = torch.distributed
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise ArgumentError(
            f"{what}: group is {kind_of(group)}, expected a ProcessGroup. "
            "Fix: pass torch.distributed.new_group(…), or None"
        )
    if not _is_power_of_two(group.size()):
        raise ArgumentError(
            f"{what}: the group has {group.size()} ranks, expected a power of two. Fix: use 1, 2, 4 or 8 ranks"
        )
    size: int = group.size()
    return size


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0
