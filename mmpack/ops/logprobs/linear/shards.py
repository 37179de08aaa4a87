"""Collectives of a vocabulary that is split over ranks, in the order of the ranks. No group: nothing to do.

Groups travel as their names, which custom ops can take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gathered(x: Tensor, group: Any) -> Tensor:
    """x [n, …] of each rank of a process group, one below the other: [ranks · n, …].

    By the functions of torch.distributed, which frameworks wrap for their groups.
    """
    import torch.distributed as dist

    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def stack_ranks(x: Tensor, group: str) -> Tensor:
    """`gathered`; x itself where there is no group."""
    return gathered(x, _resolve(group)) if group else x


def take_owned(x: Tensor, owner: Tensor, group: str) -> Tensor:
    """x [N] as the rank owner[n] has it."""
    if not group:
        return x
    return stack_ranks(x[None], group).gather(0, owner[None])[0]


def ordered_sum(x: Tensor, group: str) -> Tensor:
    """Sum of x [n, …] over the ranks, in their order: the same bits on each rank and in each run."""
    if not group:
        return x
    total = torch.zeros_like(x)
    for part in stack_ranks(x[None], group):
        total += part
    return total


def _resolve(group: str) -> Any:
    from torch.distributed import distributed_c10d

    named: Any = distributed_c10d
    return named._resolve_process_group(group)
