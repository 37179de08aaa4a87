"""What selected_logprobs and linear_selected_logprobs refuse in targets, rows and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number
from mmpack.ops.inputs import can_look_at


def check_arguments(
    what: str,
    shape: tuple[int, int],
    targets: Tensor,
    rows: Tensor | None,
    rows_unique: Tensor | None,
    row_inverse: Tensor | None,
    temperature: float,
) -> None:
    """Raise ArgumentError for indices that don't fit `shape`, (rows, vocabulary), or don't fit each other.

    Values are checked on the CPU only: on a GPU that would wait for it.
    """
    num_rows, vocab = shape
    check_number(what, "temperature", temperature, above=0)
    if (rows_unique is None) != (row_inverse is None):
        raise ArgumentError(
            f"{what}: rows_unique and row_inverse go together. Fix: pass both or none"
        )
    _check_index(what, "targets", targets, vocab)
    _check_index(what, "rows", rows, num_rows)
    _check_index(what, "rows_unique", rows_unique, num_rows)
    read = num_rows if rows is None else len(rows)
    if rows_unique is not None and row_inverse is not None:
        _check_index(what, "row_inverse", row_inverse, len(rows_unique))
        _check_inverse(what, rows, rows_unique, row_inverse)
        read = len(row_inverse)
    if len(targets) != read:
        raise ArgumentError(
            f"{what}: targets has {len(targets)} entries for {read} rows to read. "
            f"Fix: pass one target per row, and rows= where only some rows are scored"
        )


def _check_index(what: str, name: str, index: Tensor | None, bound: int) -> None:
    if index is None:
        return
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            f"{what}: {name} has shape {list(index.shape)} and dtype {index.dtype}, expected one dimension of "
            f"int64 or int32. Fix: pass compact indices, one per loss token"
        )
    if can_look_at(index) and len(index):
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= bound:
            raise ArgumentError(
                f"{what}: {name} runs from {low} to {high}, expected [0, {bound}). "
                f"Fix: targets are token ids, rows count the rows of the first argument"
            )


def _check_inverse(
    what: str, rows: Tensor | None, rows_unique: Tensor, row_inverse: Tensor
) -> None:
    """rows is rows_unique[row_inverse], and row_inverse names each of rows_unique."""
    read = len(row_inverse)
    if rows is not None and (
        len(rows) != read or (can_look_at(rows) and bool((rows_unique[row_inverse] != rows).any()))
    ):
        raise ArgumentError(
            f"{what}: rows ({len(rows)} entries) is not rows_unique[row_inverse] ({read} entries). "
            f"Fix: pass those of one batch"
        )
    if can_look_at(row_inverse) and len(row_inverse.unique()) != len(rows_unique):
        raise ArgumentError(
            f"{what}: row_inverse names {len(row_inverse.unique())} of {len(rows_unique)} rows. "
            f"Fix: pass rows_unique without rows that no loss token reads"
        )
