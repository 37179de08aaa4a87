"""Support: for each loss token the ids that the sampler's top-k, top-p or min-p left, as one ragged list.

`ScoredSupport` is the same with a logprob per id: what a teacher says of the loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of


@dataclass(frozen=True, eq=False)
class Support:
    """Loss token n may be any of ids[offsets[n] : offsets[n + 1]], which rise strictly and hold the token's target.

    Example: of two loss tokens the first had ids 3 and 7 to choose from, the second only 5.
        >>> import torch
        >>> from mmpack.ops import Support
        >>> support = Support(torch.tensor([0, 2, 3]), torch.tensor([3, 7, 5]))
        >>> len(support), support[1:].ids.tolist()
        (2, [5])
    """

    offsets: Tensor  # [N + 1] int64, from 0 to M
    ids: Tensor  # [M] int64 token ids

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def __getitem__(self, which: slice | Tensor) -> Self:
        """The lists of a slice, or of loss rows int64 [k], in that order. A GPU is waited for: their lengths are read.

        Raises: ArgumentError.
        """
        if not isinstance(which, slice | Tensor):
            raise ArgumentError(
                f"Support: it is indexed by {kind_of(which)}. Fix: index it by a slice, or a tensor of loss rows"
            )
        device = self.offsets.device
        try:
            rows = torch.arange(len(self), device=device)[which]
        except (IndexError, ValueError, TypeError) as error:
            raise ArgumentError(
                f"Support: the index does not fit its {len(self)} lists ({error}). "
                "Fix: index it by a slice, or loss rows int64 [k]"
            ) from None
        if rows.ndim != 1:
            raise ArgumentError(
                f"Support: it is indexed by a tensor of shape {list(rows.shape)}. Fix: pass loss rows [k]"
            )
        starts, lengths = self.offsets[:-1][rows], self.offsets.diff()[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = (starts - offsets[:-1]).repeat_interleave(lengths)
        flat = torch.arange(len(shift), device=device) + shift
        return type(self)(offsets, *(x[flat] for x in self._of_ids()))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same on `device`."""
        return self._each("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """The same in page-locked memory."""
        return self._each("pin_memory")

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The lists of all `parts`, one after the other. Raises: ArgumentError for none, and for other things."""
        if not parts:
            raise ArgumentError("Support.cat: there is nothing to join. Fix: pass one part or more")
        if wrong := [part for part in parts if type(part) is not cls]:
            raise ArgumentError(
                f"{cls.__name__}.cat: a part is {kind_of(wrong[0])}, expected a {cls.__name__}. "
                "Fix: pass parts of one kind"
            )
        ends = [part.offsets[-1:] for part in parts]
        shifts = torch.cat([torch.zeros_like(ends[0]), *ends]).cumsum(0)
        offsets = [part.offsets[1:] + shifts[k] for k, part in enumerate(parts)]
        columns = zip(*(part._of_ids() for part in parts), strict=True)
        return cls(torch.cat([torch.zeros_like(ends[0]), *offsets]), *map(torch.cat, columns))

    def split(self, counts: Sequence[int]) -> list[Self]:
        """The lists cut into parts of `counts`; ids are views. A GPU is waited for, once: for where ids begin.

        Raises: ArgumentError for counts that are not those of all lists.
        """
        if any(count < 0 for count in counts) or sum(counts) != len(self):
            raise ArgumentError(
                f"{type(self).__name__}.split: counts add up to {sum(counts)} for {len(self)} lists. "
                "Fix: pass counts, 0 or more, that add up to all lists"
            )
        at = torch.tensor([0, *counts]).cumsum(0)
        begin = self.offsets[at.to(self.offsets.device)].tolist()
        parts = zip(pairwise(at.tolist()), pairwise(begin), strict=True)
        return [
            type(self)(self.offsets[a : b + 1] - self.offsets[a], *(x[i:j] for x in self._of_ids()))
            for (a, b), (i, j) in parts
        ]

    def _of_ids(self) -> list[Tensor]:
        """The tensors [M]."""
        return [getattr(self, f.name) for f in fields(self) if f.name != "offsets"]

    def _each(self, move: str, *args: Any, **kwargs: Any) -> Self:
        return type(self)(
            *(getattr(x, move)(*args, **kwargs) for x in (self.offsets, *self._of_ids()))
        )


@dataclass(frozen=True, eq=False)
class ScoredSupport(Support):
    """A teacher's top ids of each loss token, which rise strictly; a list is empty where the teacher says nothing."""

    logprobs: Tensor  # [M] float32, natural log
