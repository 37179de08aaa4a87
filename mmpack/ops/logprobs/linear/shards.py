"""Collectives of a vocabulary that is split over ranks, in the order of the ranks. No group: nothing to do.

Groups travel as their names, which custom ops can take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stack_ranks(x: Tensor, group: str) -> Tensor:
    """x [n, …] of each rank, one below the other: [ranks · n, …]."""
    if not group:
        return x
    from torch.distributed import all_gather_into_tensor, get_world_size

    handle = _resolve(group)
    out = x.new_empty(get_world_size(handle) * x.shape[0], *x.shape[1:])
    all_gather_into_tensor(out, x.contiguous(), group=handle)
    return out


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
