"""Which rows of [T, …] the loss tokens read, and which loss tokens read one row together.

RowGroups [S] are what kernels read: a row per group, and the loss tokens of the group. Slots are the same groups for
the torch paths, filled up to whole chunks of a fixed row count: every product and reduction then has one shape, and a
row's bits don't depend on how many other rows there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowGroups(NamedTuple):
    """S groups in any order; group s has the loss tokens order[offsets[s] : offsets[s + 1]], rising."""

    # [S] int32 or int64, the row that a group reads; T for an empty group. None: group n reads row n.
    rows: Tensor | None
    # [N] int64, loss tokens by group. None: group n has loss token n, and no row repeats.
    order: Tensor | None
    offsets: Tensor | None  # [S + 1] int64


class Slots(NamedTuple):
    """The groups, then padding up to whole chunks. Slots without loss tokens read row 0 and write row T."""

    rows: Tensor  # [S] int64, the row that a slot reads
    writes: Tensor  # [S] int64, the row that its gradient goes to; T is cut off
    of: Tensor  # [N] int64, slot of each loss token


def make_row_groups(
    num_rows: int, rows: Tensor | None, rows_unique: Tensor | None, row_inverse: Tensor | None
) -> RowGroups:
    """Group the loss tokens by row: one stable sort, or none where the shapes say that no row repeats.

    Without `rows_unique` there are N groups, some of them empty: the number of distinct rows is not asked for.
    """
    if rows_unique is not None and row_inverse is not None:
        if len(rows_unique) == len(row_inverse):
            return RowGroups(rows_unique.index_select(0, row_inverse), None, None)
        keys, order = torch.sort(row_inverse, stable=True)
        groups = torch.arange(len(rows_unique) + 1, dtype=keys.dtype, device=keys.device)
        return RowGroups(rows_unique, order, torch.searchsorted(keys, groups))
    if rows is None:
        return RowGroups(None, None, None)
    ordered, order = torch.sort(rows, stable=True)
    new = torch.ones_like(ordered)
    new[1:] = (ordered[1:] != ordered[:-1]).to(new.dtype)
    rank = new.cumsum(0) - 1
    distinct = torch.full_like(ordered, num_rows)
    distinct[rank] = ordered  # entries of one rank write the same row
    groups = torch.arange(len(rows) + 1, device=rows.device)
    return RowGroups(distinct, order, torch.searchsorted(rank, groups))


def slots_of(
    groups: RowGroups, num_rows: int, count: int, device: torch.device, chunk: int
) -> Slots:
    """The groups of `count` loss tokens as slots, a multiple of `chunk` of them."""
    tokens = torch.arange(count, device=device)
    if groups.rows is None:
        of = distinct = writes = tokens
    elif groups.order is None or groups.offsets is None:
        of, distinct = tokens, groups.rows.long()
        writes = distinct
    else:
        slot = torch.searchsorted(groups.offsets, tokens, right=True) - 1
        of = torch.empty_like(tokens).index_copy_(0, groups.order, slot)
        used = groups.offsets[1:] > groups.offsets[:-1]
        distinct = torch.where(used, groups.rows.long(), 0)
        writes = torch.where(used, distinct, num_rows)
    padding = -len(distinct) % chunk
    return Slots(
        rows=torch.nn.functional.pad(distinct, (0, padding)),
        writes=torch.nn.functional.pad(writes, (0, padding), value=num_rows),
        of=of,
    )


def by_slot(values: Tensor, slots: Slots) -> Tensor:
    """Values [N] that are equal on each slot, as [S]; 0 on slots without loss tokens."""
    # Entries of one slot write the same bits.
    return values.new_zeros(len(slots.rows)).index_copy_(0, slots.of, values)
