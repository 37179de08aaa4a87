"""Which rows of [T, …] a selected-logprob op reads, and how the [N] loss tokens lie on them.

Slots [S] are the distinct rows in chunks of a fixed size, so that every product and reduction has one shape and a
row's bits don't depend on how many others there are. Unused slots read row 0 and write to row T, which is cut off.
RowGroups say the same in the form that kernels read, without chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number
from mmpack.ops.inputs import can_look_at
from mmpack.ops.segments import keyed_sum


class Slots(NamedTuple):
    rows: Tensor  # [S] int64, row that a slot reads
    writes: Tensor  # [S] int64, row that its gradient goes to; T for an unused slot
    of: Tensor  # [N] int64, slot of each loss token


class RowGroups(NamedTuple):
    """Slots [S] in any order, and the loss tokens of each: order[offsets[s] : offsets[s + 1]], rising."""

    # [S] int32 or int64, row that a slot reads; T for an unused one. None: slot n reads row n.
    rows: Tensor | None
    # [N] int64, loss tokens by slot. None: slot n has token n, and no row repeats.
    order: Tensor | None
    offsets: Tensor | None  # [S + 1] int64


class RowGradients(NamedTuple):
    """Gradients [N] of logprobs and entropies, gathered by slot. Sums in the order of n, in float64."""

    logprob: Tensor  # [S] sum over the row's loss tokens
    entropy: Tensor  # [S]
    live: Tensor  # [S] bool: any of the row's gradients is not 0
    target: Tensor  # [N] sum over the loss tokens with the same row and target


def check_arguments(
    what: str,
    shape: tuple[int, int],
    targets: Tensor,
    rows: Tensor | None,
    rows_unique: Tensor | None,
    row_inverse: Tensor | None,
    temperature: float,
) -> None:
    """Raise ArgumentError for indices that don't fit `shape`, rows and vocabulary.

    Their range is looked at on the CPU only: on a GPU that would wait for it.
    """
    num_rows, vocab = shape
    check_number(what, "temperature", temperature, above=0)
    if (rows_unique is None) != (row_inverse is None):
        raise ArgumentError(
            f"{what}: rows_unique and row_inverse go together. Fix: pass both or none"
        )
    names = {
        "targets": (targets, vocab),
        "rows": (rows, num_rows),
        "rows_unique": (rows_unique, num_rows),
        "row_inverse": (row_inverse, 0 if rows_unique is None else rows_unique.numel()),
    }
    for name, (index, bound) in names.items():
        if index is None:
            continue
        if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"{what}: {name} has shape {list(index.shape)} and dtype {index.dtype}, expected one dimension of "
                f"int64 or int32. Fix: pass compact indices, one a loss token"
            )
        if can_look_at(index) and len(index):
            low, high = (int(x) for x in index.aminmax())
            if low < 0 or high >= bound:
                raise ArgumentError(
                    f"{what}: {name} runs from {low} to {high}, expected [0, {bound}). "
                    f"Fix: targets are token ids, rows count the rows of the first argument"
                )
    read = num_rows if rows is None else len(rows)
    if rows_unique is not None and row_inverse is not None:
        read = len(row_inverse)
        if rows is not None and (
            len(rows) != read
            or (can_look_at(rows) and bool((rows_unique[row_inverse] != rows).any()))
        ):
            raise ArgumentError(
                f"{what}: rows ({len(rows)} entries) is not rows_unique[row_inverse] ({read} entries). "
                f"Fix: pass those of one batch"
            )
        if can_look_at(row_inverse) and len(row_inverse.unique()) != len(rows_unique):
            raise ArgumentError(
                f"{what}: row_inverse names {len(row_inverse.unique())} of {len(rows_unique)} rows. "
                f"Fix: pass rows_unique without rows that nobody reads"
            )
    if len(targets) != read:
        raise ArgumentError(
            f"{what}: targets has {len(targets)} entries for {read} rows to read. "
            f"Fix: pass one target a row, and rows= where only some rows are scored"
        )


def make_row_groups(
    num_rows: int, rows: Tensor | None, rows_unique: Tensor | None, row_inverse: Tensor | None
) -> RowGroups:
    """Which loss tokens read which row: at most one stable sort, and none where shapes say that no row repeats.

    Without `rows_unique`, S is N: how many rows are distinct is not asked.
    """
    if rows_unique is not None and row_inverse is not None:
        if len(rows_unique) == len(row_inverse):
            return RowGroups(rows_unique.index_select(0, row_inverse), None, None)
        keys, order = torch.sort(row_inverse, stable=True)
        slots = torch.arange(len(rows_unique) + 1, dtype=keys.dtype, device=keys.device)
        return RowGroups(rows_unique, order, torch.searchsorted(keys, slots))
    if rows is None:
        return RowGroups(None, None, None)
    ordered, order = torch.sort(rows, stable=True)
    new = torch.ones_like(ordered)
    new[1:] = (ordered[1:] != ordered[:-1]).to(new.dtype)
    rank = new.cumsum(0) - 1
    distinct = torch.full_like(ordered, num_rows)
    distinct[rank] = ordered  # entries of one rank write the same row
    slots = torch.arange(len(rows) + 1, device=rows.device)
    return RowGroups(distinct, order, torch.searchsorted(rank, slots))


def make_slots(
    num_rows: int,
    count: int,
    device: torch.device,
    rows: Tensor | None,
    rows_unique: Tensor | None,
    row_inverse: Tensor | None,
    chunk: int,
) -> Slots:
    """Lay `count` loss tokens on slots. Without `rows_unique`, S covers N: how many rows are distinct is not asked."""
    runs = make_row_groups(num_rows, rows, rows_unique, row_inverse)
    return slots_of(runs, num_rows, count, device, chunk)


def slots_of(runs: RowGroups, num_rows: int, count: int, device: torch.device, chunk: int) -> Slots:
    """The same runs as slots, padded to whole chunks."""
    tokens = torch.arange(count, device=device)
    if runs.rows is None:
        of = distinct = writes = tokens
    elif runs.order is None or runs.offsets is None:
        of, distinct = tokens, runs.rows.long()
        writes = distinct
    else:
        slot = torch.searchsorted(runs.offsets, tokens, right=True) - 1
        of = torch.empty_like(tokens).index_copy_(0, runs.order, slot)
        used = runs.offsets[1:] > runs.offsets[:-1]
        distinct = torch.where(used, runs.rows.long(), 0)
        writes = torch.where(used, distinct, num_rows)
    padding = -len(distinct) % chunk
    return Slots(
        rows=torch.nn.functional.pad(distinct, (0, padding)),
        writes=torch.nn.functional.pad(writes, (0, padding), value=num_rows),
        of=of,
    )


def gather_gradients(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    slots: Slots,
    targets: Tensor,
    vocab: int,
    distinct: bool = False,
) -> RowGradients:
    """Sum the gradients [N] by row and by (row, target). `distinct`: no row repeats, there is nothing to add."""
    logprob = grad_logprob.double()
    entropy = torch.zeros_like(logprob) if grad_entropy is None else grad_entropy.double()
    live, target = (logprob != 0) | (entropy != 0), logprob
    if not distinct:
        live = keyed_sum(live.double(), slots.of) > 0
        target = keyed_sum(logprob, slots.of * vocab + targets)
        logprob, entropy = keyed_sum(logprob, slots.of), keyed_sum(entropy, slots.of)
    return RowGradients(
        by_slot(logprob, slots), by_slot(entropy, slots), by_slot(live, slots), target
    )


def by_slot(values: Tensor, slots: Slots) -> Tensor:
    """Values [N] that are equal on each slot, as [S]; 0 on slots that no loss token uses."""
    # Entries of one slot write the same bits.
    return values.new_zeros(len(slots.rows)).index_copy_(0, slots.of, values)
