"""Rewards of all ranks: groups that are split over ranks are compared as a whole."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from mmpack.errors import ArgumentError, kind_of
from mmpack.losses.samples import check_column
from mmpack.ops.inputs import check_are_tensors


def gather_rewards(*columns: Tensor, process_group: Any = None) -> tuple[Any, ...]:
    """The columns of all ranks, one after the other in the order of ranks, and this rank's samples in them as a slice.

    Every rank calls it, with as many columns as the others and any number of samples; without torch.distributed the
    columns are returned as they are. Values keep their bits, so results computed from them equal those of one process:

        rewards, group_index, own = mp.losses.gather_rewards(rewards, group_index)
        advantages = mp.group_advantages(rewards, group_index)[own]

    Args: columns: [b] each, of any dtype, one value per sample of this rank: rewards, group_index, num_tokens,
    unit_index. Group numbers must mean the same on every rank: `mp.group_numbers`. process_group: a group of
    torch.distributed; None: all ranks.

    Waits for the other ranks once per call. Raises ArgumentError for columns of unequal length, and on every rank where
    their number or dtypes differ between ranks.

    Example: one process.
        >>> import torch
        >>> import mmpack as mp
        >>> mp.losses.gather_rewards(torch.tensor([1.0, 0.5]))
        (tensor([1.0000, 0.5000]), slice(0, 2, None))
    """
    names = {f"columns[{k}]": column for k, column in enumerate(columns)}
    check_are_tensors("gather_rewards", **names)
    if not columns:
        raise ArgumentError(
            "gather_rewards: no columns were passed. Fix: pass the rewards and group_index"
        )
    own = columns[0]
    fix = "pass one value per sample in each"
    for name, column in names.items():
        check_column("gather_rewards", name, column, own.numel(), "values", own, fix)
    if not (distributed.is_available() and distributed.is_initialized()):
        return (*(column.detach() for column in columns), slice(0, len(own)))
    ranks = distributed.get_world_size(process_group)
    dtypes = [str(column.dtype).removeprefix("torch.") for column in columns]
    mine = [len(own), len(columns), zlib.crc32(" ".join(dtypes).encode())]
    about = torch.tensor(mine, dtype=torch.int64, device=own.device)
    abouts = [torch.empty_like(about) for _ in range(ranks)]
    distributed.all_gather(abouts, about, group=process_group)
    counts, *alike = torch.stack(abouts).t().tolist()
    if any(len(set(of_ranks)) > 1 for of_ranks in alike):
        raise ArgumentError(
            f"gather_rewards: the columns here are {', '.join(dtypes)}; another rank has more, fewer, or "
            "another dtype. Fix: pass the same columns on all ranks"
        )
    before = sum(counts[: distributed.get_rank(process_group)])
    whole = (_gathered(column.detach(), counts, process_group) for column in columns)
    return (*whole, slice(before, before + len(own)))


def _gathered(column: Tensor, counts: list[int], process_group: Any) -> Tensor:
    """All ranks' values, as bytes: of every dtype, and bit for bit."""
    width = column.dtype.itemsize
    padded = column.new_zeros(max(counts, default=0))
    padded[: len(column)] = column
    parts = [torch.empty_like(padded).view(torch.uint8) for _ in counts]
    if len(padded):
        distributed.all_gather(parts, padded.view(torch.uint8), group=process_group)
    kept = [part[: width * n].view(column.dtype) for part, n in zip(parts, counts, strict=True)]
    return torch.cat(kept)


def group_numbers(names: Iterable[str]) -> Tensor:
    """A number for each name, [B] int64: the same on every rank and in every run (the first 8 bytes of its sha256).

    For group ids whose samples lie on several ranks, and for what GiGPO takes as anchors: the hash of a page, a
    screenshot's `cache_key`. Raises ArgumentError for what is no str.

    Example:
        >>> import mmpack as mp
        >>> a, b, c = mp.group_numbers(["p1", "p2", "p1"]).tolist()
        >>> a == c, a == b
        (True, False)
    """
    scalar = isinstance(names, Tensor) and names.ndim == 0
    if scalar or isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise ArgumentError(f"group_numbers: names is {kind_of(names)}. Fix: pass a list of str")
    numbers = []
    for k, name in enumerate(names):
        if not isinstance(name, str):
            raise ArgumentError(
                f"group_numbers: names[{k}] is {kind_of(name)}, expected a str. Fix: pass names as str"
            )
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        numbers.append(int.from_bytes(digest[:8], "little", signed=True))
    return torch.tensor(numbers, dtype=torch.int64)
