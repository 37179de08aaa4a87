"""Which items each optimizer step takes: whole groups, in an order that follows from seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def groups_in(names: Sequence[str]) -> list[list[int]]:
    """The items of each group, groups in order of first appearance."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(name, []).append(i)
    return list(found.values())


def steps_of(
    groups: list[list[int]],
    groups_per_step: int | None,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    epoch: int,
) -> list[list[int]]:
    """The items of each step. Shuffled as torch's DistributedSampler does: one permutation of seed + epoch."""
    order = list(range(len(groups)))
    if shuffle:
        generator = torch.Generator().manual_seed((seed + epoch) % 2**64)
        order = torch.randperm(len(groups), generator=generator).tolist()
    size = max(len(groups), 1) if groups_per_step is None else groups_per_step
    cuts = [order[i : i + size] for i in range(0, len(order), size)]
    if drop_last and cuts and len(cuts[-1]) < size:
        cuts.pop()
    return [[i for g in cut for i in groups[g]] for cut in cuts]
