"""Micro-batches of one optimizer step, cut again so that the rows of a group meet in one pack.

The rows stay those of the step and parts stay equal, as TRL's collectives need them: a loss that is a mean over rows,
or a sum over tokens divided by a fixed number, adds up to the same over the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

# in TRL's dict: int64 [B], the number of each row's group; the videos of each row
GROUPS, VIDEOS = "mmpack_groups", "mmpack_videos"


def order_of(groups: Sequence[Any]) -> list[int]:
    """The rows, one group after the other, in the order of first appearance."""
    first: dict[Any, int] = {}
    for group in groups:
        first.setdefault(group, len(first))
    return sorted(range(len(groups)), key=lambda row: first[groups[row]])


def joined_parts(
    groups: Sequence[Any], prompts: np.ndarray, completions: np.ndarray, parts: int, budget: int
) -> int:
    """How many of `parts` equal parts of the rows become one pass: the largest divisor of it that the budget allows.

    Args: `groups`: [B], each one's rows together. `prompts`, `completions`: [B] tokens; a pass computes the prompt of a
    group once. `budget`: tokens of a pass.
    """

    def tokens(rows: range) -> int:
        once = {groups[row]: int(prompts[row]) for row in rows}
        return sum(once.values()) + int(completions[rows.start : rows.stop].sum())

    for joined in range(parts, 1, -1):
        size = len(groups) // parts * joined
        if parts % joined == 0 and all(
            tokens(range(first, first + size)) <= budget for first in range(0, len(groups), size)
        ):
            return joined
    return 1


def largest_group(groups: Sequence[Any], prompts: np.ndarray, completions: np.ndarray) -> int:
    """Tokens of the group that has most."""
    sums: dict[Any, int] = {}
    for group, prompt, completion in zip(groups, prompts, completions, strict=True):
        sums[group] = sums.get(group, int(prompt)) + int(completion)
    return max(sums.values())


def chosen(rows: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """TRL's dict of rows (pixels split by row) in another order; numbers of the batch stay."""
    index = torch.tensor(order)

    def of(values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            return values if values.ndim == 0 else values[index.to(values.device)]
        return None if values is None else [values[row] for row in order]

    return {name: of(values) for name, values in rows.items()}


def concatenated(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """TRL's dicts of rows (pixels split by row) as one."""

    def of(values: list[Any]) -> Any:
        first = values[0]
        if first is None or getattr(first, "ndim", 1) == 0:
            return first
        return torch.cat(values) if isinstance(first, torch.Tensor) else [*chain(*values)]

    return {name: of([c[name] for c in chunks]) for name in chunks[0]}
