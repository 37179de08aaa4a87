"""Samples that count once: per-turn samples of a trajectory have one reward, and are one member of their group."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError


def first_and_inverse(unit_index: Tensor) -> tuple[Tensor, Tensor]:
    """The first sample of each unit [U], in the order of the batch, and the unit of each sample [B]; int64."""
    units, inverse = torch.unique(unit_index, return_inverse=True)
    count = len(unit_index)
    index = torch.arange(count, device=unit_index.device)
    first = index.new_full((len(units),), count).scatter_reduce(0, inverse, index, "amin")
    first, order = torch.sort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return first, rank[inverse]


def check_alike(first: Tensor, inverse: Tensor, **columns: Tensor) -> None:
    """Raise ArgumentError where samples of one unit differ in a column [B]."""
    for name, column in columns.items():
        other = (column != column[first][inverse]).nonzero()[:, 0]
        if len(other):
            b = int(other[0])
            a = int(first[inverse[b]])
            raise ArgumentError(
                f"group_advantages: {name}[{a}] is {column[a].item()} and {name}[{b}] is {column[b].item()}, "
                "but both are of one unit. "
                f"Fix: give samples of one unit one {name.replace('rewards', 'reward')}, or leave unit_index out"
            )
