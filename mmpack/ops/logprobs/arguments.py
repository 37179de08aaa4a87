"""What selected_logprobs and linear_selected_logprobs refuse in targets, rows, temperature and support."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_flag, check_number, kind_of
from mmpack.ops.inputs import can_look_at, check_index, check_tensors
from mmpack.ops.logprobs.call import runtime_scalar
from mmpack.ops.logprobs.row_groups import RowGroups, make_row_groups
from mmpack.ops.logprobs.support import Support

OPTIONAL = ("bias", "rows", "rows_unique", "row_inverse")


class Tokens(NamedTuple):
    """The loss tokens of a call as the public functions are given them; see `selected_logprobs`."""

    targets: Tensor  # [N]
    rows: Tensor | None  # [N]
    rows_unique: Tensor | None  # [R]
    row_inverse: Tensor | None  # [N]
    temperature: float
    entropy: bool

    def check(self, what: str, **read: Tensor | None) -> None:
        """Raise ArgumentError for what is no tensor, here and in what is `read`, and for an entropy that is no flag."""
        indices = dict(zip(self._fields[:4], self[:4], strict=True))
        check_tensors(what, OPTIONAL, **read, **indices)
        check_flag(what, "entropy", self.entropy)

    def check_values(self, what: str, num_rows: int, vocab: int) -> None:
        """Raise ArgumentError for indices that don't fit the rows and the vocabulary, or don't fit each other.

        Values are checked on the CPU only: on a GPU that would wait for it.
        """
        targets, rows, rows_unique, row_inverse = self[:4]
        check_number(what, "temperature", self.temperature, above=0)
        if (rows_unique is None) != (row_inverse is None):
            raise ArgumentError(
                f"{what}: rows_unique and row_inverse must be passed together. Fix: pass both or neither"
            )
        check_index(what, "targets", targets, vocab)
        for name, index in (("rows", rows), ("rows_unique", rows_unique)):
            if index is not None:
                check_index(what, name, index, num_rows)
        read = num_rows if rows is None else len(rows)
        if rows_unique is not None and row_inverse is not None:
            check_index(what, "row_inverse", row_inverse, len(rows_unique))
            _check_inverse(what, rows, rows_unique, row_inverse)
            read = len(row_inverse)
        if len(targets) != read:
            raise ArgumentError(
                f"{what}: targets has {len(targets)} entries for {read} rows to read. "
                f"Fix: pass one target per row, and rows= where only some rows are scored"
            )

    def groups(self, num_rows: int) -> RowGroups:
        """Loss tokens by the row that they read."""
        return make_row_groups(num_rows, *self[1:4])

    @property
    def scale(self) -> Tensor:
        """The temperature as a tensor [] on the device of the targets."""
        return runtime_scalar(self.temperature, self.targets.device)

    @property
    def row_of_each(self) -> Tensor | None:
        """The row that each token reads, [N]; None: token n reads row n."""
        if self.rows_unique is not None and self.row_inverse is not None:
            return self.rows_unique.index_select(0, self.row_inverse)
        return self.rows

    @property
    def distinct(self) -> bool:
        """Whether the shapes say that no row repeats."""
        if self.rows_unique is not None and self.row_inverse is not None:
            return self.rows_unique.shape[0] == self.row_inverse.shape[0]
        return self.rows is None


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
            f"Fix: pass all three from one batch"
        )
    if can_look_at(row_inverse) and len(row_inverse.unique()) != len(rows_unique):
        raise ArgumentError(
            f"{what}: row_inverse names {len(row_inverse.unique())} of {len(rows_unique)} rows. "
            f"Fix: pass rows_unique without rows that no loss token reads"
        )


def check_list(what: str, where: str, support: Any) -> None:
    """Raise ArgumentError unless `support` is a Support whose offsets [N + 1] cut its ids [M] into lists.

    Offsets are looked at on the CPU only, as above.
    """
    if not isinstance(support, Support):
        raise ArgumentError(
            f"{what}: {where} is {kind_of(support)}, expected a Support. "
            "Fix: pass batch.kept_ids, or mp.ops.Support(offsets, ids)"
        )
    offsets, ids = support.offsets, support.ids
    named = {f"{where}.offsets": offsets, f"{where}.ids": ids}
    check_tensors(what, (), **named)
    for name, x in named.items():
        check_index(what, name, x)
    if len(offsets) < 2 and (len(offsets) == 0 or len(ids)):
        raise ArgumentError(
            f"{what}: {where} has {len(offsets)} offsets and {len(ids)} ids. Fix: pass offsets [N + 1], from 0 to M"
        )
    if can_look_at(offsets):
        first, last = int(offsets[0]), int(offsets[-1])
        falls = bool((offsets.diff() < 0).any())
        if first != 0 or last != len(ids) or falls:
            order = "and fall in between" if falls else f"for {len(ids)} ids"
            raise ArgumentError(
                f"{what}: {where}.offsets run from {first} to {last} {order}, expected to rise from 0 to {len(ids)}. "
                f"Fix: pass the running sum of the lists' lengths"
            )


def check_support(what: str, support: Any, targets: Tensor, vocab: int) -> None:
    """Raise ArgumentError unless `support` has a list for each of `targets` [N], which rises and holds the target.

    Values are checked on the CPU only, as above.
    """
    check_list(what, "support", support)
    offsets, ids = support.offsets, support.ids
    check_tensors(what, (), targets=targets, **{"support.ids": ids})
    if len(support) != len(targets):
        raise ArgumentError(
            f"{what}: support has {len(offsets)} offsets and {len(ids)} ids for {len(targets)} targets, expected "
            f"{len(targets) + 1} offsets. Fix: pass one list per target"
        )
    if can_look_at(offsets) and can_look_at(ids) and can_look_at(targets):
        _check_lists(what, offsets.long(), ids.long(), targets.long(), vocab)


def _check_lists(what: str, offsets: Tensor, ids: Tensor, targets: Tensor, vocab: int) -> None:
    """Lists are not empty, in [0, V) and rising, with their target."""
    length = offsets.diff()
    empty = _first(length == 0)
    if empty is not None:
        raise ArgumentError(
            f"{what}: the list of loss token {empty} in support is empty, so its softmax has no value. "
            "Fix: put at least the target into each list"
        )
    check_index(what, "support.ids", ids, vocab)
    tokens = torch.repeat_interleave(length)
    falls = _first((ids[1:] <= ids[:-1]) & (tokens[1:] == tokens[:-1]))
    if falls is not None:
        raise ArgumentError(
            f"{what}: the list of loss token {int(tokens[falls])} in support has {int(ids[falls + 1])} after "
            f"{int(ids[falls])}, expected ids that rise. Fix: sort each list, and drop repeated ids"
        )
    held = torch.zeros_like(targets, dtype=torch.bool)
    held[tokens[ids == targets[tokens]]] = True
    missing = _first(~held)
    if missing is not None:
        raise ArgumentError(
            f"{what}: the list of loss token {missing} in support lacks its target, id {int(targets[missing])}. "
            f"Fix: pass the lists recorded when the targets were sampled"
        )


def _first(found: Tensor) -> int | None:
    """The first index where `found` is True."""
    where = found.nonzero()
    return int(where[0]) if len(where) else None
