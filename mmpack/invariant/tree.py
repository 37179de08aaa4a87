"""Sums over parts by one binary tree: neighbours first, then neighbouring pairs.

Ranks that hold neighbouring parts sum theirs by the lower levels, and the levels above them are summed by every rank
alike: so 1, 2, 4 or 8 ranks give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.inputs import check_are_tensors


def tree_sum(parts: Tensor) -> Tensor:
    """parts [P, ...] -> [...], of any dtype, which the sum keeps. P is a power of two. Differentiable.

    Raises ArgumentError for another number of parts.

    Example:
        >>> import torch
        >>> from mmpack.invariant import tree_sum
        >>> tree_sum(torch.tensor([1.0, 2.0, 3.0, 4.0])).item()
        10.0
    """
    check_are_tensors("tree_sum", parts=parts)
    if parts.ndim == 0 or not is_power_of_two(len(parts)):
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
    ranks, _ = ranks_of("tree_all_reduce", group)
    return _reduced(x, group, ranks)


def _reduced(x: Tensor, group: Any, ranks: int) -> Tensor:
    if ranks == 1:
        return x
    x = x.detach().contiguous()
    gathered = x.new_empty(ranks, *x.shape)
    torch.distributed.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=group)
    return tree_sum(gathered)


def ranks_of(what: str, group: Any) -> tuple[int, int]:
    """How many ranks, and which this is. Raises ArgumentError, as `what`, for what is no group of 2^n ranks."""
    if group is None:
        return 1, 0
    distributed = torch.distributed
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise ArgumentError(
            f"{what}: group is {kind_of(group)}, expected a ProcessGroup. "
            "Fix: pass torch.distributed.new_group(…), or None"
        )
    if not is_power_of_two(group.size()):
        raise ArgumentError(
            f"{what}: the group has {group.size()} ranks, expected a power of two. Fix: use 1, 2, 4 or 8 ranks"
        )
    return group.size(), group.rank()


def is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0
