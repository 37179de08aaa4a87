"""verl's micro-batches as bins of mmpack's plan over a rank's mini-batch: rows of one prompt share a bin.

A bin holds at most the rows that verl's own setting allows, counted once where they are shared, media included.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from mmpack.errors import ModelError


def calling(function: Any, **others: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of verl's `function` that calls `others` in the place of its module's functions of these names.

    Raises: ModelError where it calls none of that name.
    """
    for name in others:
        if name not in function.__code__.co_names:
            raise ModelError(
                f"verl engine: {function.__qualname__} calls no {name}. Fix: use verl 0.9, or another engine"
            )
    names = function.__globals__ | others
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


def budget_of(data: Any, ranks: int) -> int:
    """The packed rows of a micro-batch, which `ranks` share.

    With use_dynamic_bsz the tokens that verl allows; else as many as micro_batch_size_per_gpu of the mini-batch's
    longest row.
    """
    from verl.utils import tensordict_utils as tu

    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        return int(data["max_token_len_per_gpu"]) * ranks
    return int(data["micro_batch_size_per_gpu"]) * int(data["input_ids"].offsets().diff().max())


def most_of(group: Any) -> Callable[[int], int]:
    """`count -> the most of the ranks of group`; without one, the count itself."""

    def most(count: int) -> int:
        if group is None or torch.distributed.get_world_size(group) == 1:
            return count
        from verl.utils.device import get_device_name

        counted = torch.tensor(count, device=get_device_name())
        torch.distributed.all_reduce(counted, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(counted)

    return most
