"""Calls of both ops, and what their forwards leave for their backwards.

An entry m is one id of one token's list: M of them, those of a token side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmpack.ops.logprobs.linear.call import Head
from mmpack.ops.logprobs.support import Support
from mmpack.ops.segments import entry_segments


class Lists(NamedTuple):
    """What the statistics of all lists read in addition to the entries' logits."""

    starts: Tensor  # [N + 1] int64, `Support.offsets`
    ids: Tensor  # [M] int64, rising strictly within a token's list
    targets: Tensor  # [N] int64 or int32
    temperature: Tensor  # [] float64

    @property
    def tokens(self) -> Tensor:
        """The loss token of each entry, [M] int64."""
        # Offsets that don't reach M give NaN everywhere.
        return entry_segments(self.starts, len(self.ids))


class HiddenCall(NamedTuple):
    """Tensors first, then options. Weight and bias are this rank's part of the vocabulary; ids count in the whole."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V / ranks, H]
    bias: Tensor | None  # [V / ranks]
    # Lists.
    starts: Tensor
    ids: Tensor
    targets: Tensor
    temperature: Tensor
    rows: Tensor | None  # [N], None: token n reads row n
    distinct: bool  # no row repeats
    products: bool  # multiply the whole head where it can be done, see products.py
    softcap: float | None
    entropy: bool
    first_column: int  # of this rank, in the whole vocabulary
    vocab: int  # V
    group: str  # name of the process group; "": one rank

    @property
    def head(self) -> Head:
        return Head(*self[:3], self.softcap, *self[-3:])

    @property
    def lists(self) -> Lists:
        return Lists(self.starts, self.ids, self.targets, self.temperature)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the results."""
        factors = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        return torch.promote_types(factors, torch.float32)

    @property
    def entry_rows(self) -> Tensor:
        """The row of hidden that each entry reads, [M] int64."""
        tokens = self.lists.tokens
        return tokens if self.rows is None else self.rows.long()[tokens]

    @property
    def columns(self) -> Tensor:
        """The row of weight of each entry, [M] int64; one past the end for those of other ranks."""
        here = self.ids.long() - self.first_column
        shard = len(self.weight)
        return torch.where((here >= 0) & (here < shard), here, shard)

    @property
    def owner(self) -> Tensor:
        """The rank that has each entry."""
        shard = max(len(self.weight), 1)
        return (self.ids.long() // shard).clamp_(0, max(self.vocab // shard - 1, 0))


class LogitsCall(NamedTuple):
    """Tensors first, then options."""

    logits: Tensor  # [T, V]
    # Lists.
    starts: Tensor
    ids: Tensor
    targets: Tensor
    temperature: Tensor
    rows: Tensor | None  # [N], None: token n reads row n
    places: Tensor | None  # [N], the row of the gradient that token n adds to; None: row n
    distinct: bool  # no row repeats
    entropy: bool
    gradient: str  # "dense", "compact" or "inplace"
    num_places: int  # rows of the gradient

    @property
    def lists(self) -> Lists:
        return Lists(self.starts, self.ids, self.targets, self.temperature)

    def entries_of(self, rows: Tensor | None) -> Tensor:
        """`rows` [N] by entry, [M] int64."""
        tokens = self.lists.tokens
        return tokens if rows is None else rows.long()[tokens]


class Statistics(NamedTuple):
    """Per loss token, [N] each, and per entry."""

    logprobs: Tensor  # float32, or float64 for float64 inputs
    # float64, nats; [0] unless asked for. Rounded, they would shift the whole slope of a list that is nearly flat
    entropies: Tensor
    maximum: Tensor  # float64, of the list
    log_total: Tensor  # float64, log of the sum of exp above the maximum
    entry_logits: Tensor  # [M], before the temperature


def empty_statistics(like: Tensor, call: HiddenCall | LogitsCall, dtype: torch.dtype) -> Statistics:
    """What a forward returns, without data; on the device of `like`."""
    count = call.targets.shape[0]
    logprobs, entries = (like.new_empty(n, dtype=dtype) for n in (count, call.ids.shape[0]))
    sizes = (count if call.entropy else 0), count, count
    entropies, maximum, log_total = (like.new_empty(n, dtype=torch.float64) for n in sizes)
    return Statistics(logprobs, entropies, maximum, log_total, entries)


class Window(NamedTuple):
    """Rows of some tokens and columns of some ids, as a block of logits [rows, columns] has them."""

    lists: Lists
    first_token: int
    rows: int
    first_column: int
    columns: int


class Runs(NamedTuple):
    """Entries that are summed together: run r has the entries order[offsets[r] : offsets[r + 1]]."""

    keys: Tensor  # [M] int64, the run of each entry; R and more: none
    order: Tensor | None  # [M] int64; None: entries lie in the order of the runs
    offsets: Tensor  # [R + 1] int64


def lists_of(support: Support, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, ids and targets of a call, contiguous as the kernels read them."""
    return support.offsets.long().contiguous(), support.ids.contiguous(), targets.contiguous()


def runs_by(keys: Tensor, count: int) -> Runs:
    """Runs 0 to `count` of entries with these keys [M], each in the order of the entries: one stable sort."""
    ordered, order = torch.sort(keys, stable=True)
    bounds = torch.arange(count + 1, device=keys.device)
    return Runs(keys, order, torch.searchsorted(ordered, bounds))
