"""Which rows of [T, …] a selected-logprob op reads, and how the [N] loss tokens lie on them.

Slots [S] are the distinct rows in chunks of a fixed size, so that every product and reduction has one shape and a
row's bits don't depend on how many others there are. Unused slots read row 0 and write to row T, which is cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.segments import keyed_sum


class Slots(NamedTuple):
    rows: Tensor  # [S] int64, row that a slot reads
    writes: Tensor  # [S] int64, row that its gradient goes to; T for an unused slot
    of: Tensor  # [N] int64, slot of each loss token


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
    if not temperature > 0:
        raise ArgumentError(f"{what}: temperature is {temperature}. Fix: pass a number above 0")
    if (rows_unique is None) != (row_inverse is None):
        raise ArgumentError(
            f"{what}: rows_unique and row_inverse go together. Fix: pass both or none"
        )
    names = {
        "targets": (targets, vocab),
        "rows": (rows, num_rows),
        "rows_unique": (rows_unique, num_rows),
        "row_inverse": (row_inverse, 0 if rows_unique is None else len(rows_unique)),
    }
    for name, (index, bound) in names.items():
        if index is None:
            continue
        if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"{what}: {name} has shape {list(index.shape)} and dtype {index.dtype}, expected one dimension of "
                f"int64 or int32. Fix: pass compact indices, one a loss token"
            )
        if index.device.type == "cpu" and len(index):
            low, high = (int(x) for x in index.aminmax())
            if low < 0 or high >= bound:
                raise ArgumentError(
                    f"{what}: {name} runs from {low} to {high}, expected [0, {bound}). "
                    f"Fix: targets are token ids, rows count the rows of the first argument"
                )
    read = num_rows if rows is None else len(rows)
    if rows_unique is not None and row_inverse is not None:
        read = len(row_inverse)
        on_cpu = rows is not None and rows.device.type == "cpu"
        if rows is not None and (
            len(rows) != read or (on_cpu and bool((rows_unique[row_inverse] != rows).any()))
        ):
            raise ArgumentError(
                f"{what}: rows ({len(rows)} entries) is not rows_unique[row_inverse] ({read} entries). "
                f"Fix: pass those of one batch"
            )
    if len(targets) != read:
        raise ArgumentError(
            f"{what}: targets has {len(targets)} entries for {read} rows to read. "
            f"Fix: pass one target a row, and rows= where only some rows are scored"
        )


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
    if rows_unique is not None and row_inverse is not None:
        distinct, of = rows_unique.long(), row_inverse.long()
        used = torch.ones_like(distinct, dtype=torch.bool)
    elif rows is None:
        distinct = of = torch.arange(count, device=device)
        used = torch.ones_like(distinct, dtype=torch.bool)
    else:
        ordered, order = torch.sort(rows.long(), stable=True)
        new = torch.ones_like(ordered)
        new[1:] = (ordered[1:] != ordered[:-1]).long()
        rank = new.cumsum(0) - 1
        of = torch.empty_like(order).index_copy_(0, order, rank)
        distinct = torch.zeros_like(ordered)
        distinct[rank] = ordered  # entries of one rank write the same row
        used = torch.arange(count, device=device) <= rank[-1:]
    padding = -len(distinct) % chunk
    writes = torch.where(used, distinct, num_rows)
    return Slots(
        rows=torch.nn.functional.pad(distinct, (0, padding)),
        writes=torch.nn.functional.pad(writes, (0, padding), value=num_rows),
        of=of,
    )


def gather_gradients(
    grad_logprob: Tensor, grad_entropy: Tensor | None, slots: Slots, targets: Tensor, vocab: int
) -> RowGradients:
    """Sum the gradients [N] by row and by (row, target)."""
    logprob = grad_logprob.double()
    entropy = torch.zeros_like(logprob) if grad_entropy is None else grad_entropy.double()
    live = keyed_sum(((logprob != 0) | (entropy != 0)).double(), slots.of) > 0

    def by_slot(values: Tensor) -> Tensor:
        # Entries of one slot write the same bits.
        return values.new_zeros(len(slots.rows)).index_copy_(0, slots.of, values)

    return RowGradients(
        logprob=by_slot(keyed_sum(logprob, slots.of)),
        entropy=by_slot(keyed_sum(entropy, slots.of)),
        live=by_slot(live),
        target=keyed_sum(logprob, slots.of * vocab + targets),
    )
