"""What attention within sequences means for kernels: offsets, equal lengths side by side, blocks for FlexAttention.

Made on the host from the sequences' lengths, once per forward of a vision tower, so that nothing is asked of the GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError
from mmpack.ops.attention.attention_plan import FLEX_BLOCK
from mmpack.ops.rows.inverse import Inverse


@dataclass
class SequencePlan:
    """S sequences of adjacent rows, T in all; every row sees all rows of its own sequence, and no other."""

    rows: int  # T
    cu_seqlens: torch.Tensor  # [S+1] int32
    max_seqlen: int
    runs: tuple[tuple[int, int], ...]  # (length, how many) of adjacent sequences of one length
    groups: tuple[tuple[int, int], ...]  # the same of all sequences of one length
    # Both ways between the rows and the rows group by group; None where the rows lie so.
    into_groups: Inverse | None
    from_groups: Inverse | None
    pairs: int  # of a query and a key that it sees
    full_blocks: int  # of FLEX_BLOCK² pairs, all of them seen
    mixed_blocks: int  # some pairs are seen
    choice: dict[torch.dtype, str] | None = None  # queries' dtype -> backend; see `resolve`
    chosen_under: tuple[Any, ...] | None = None  # the settings that `choice` holds for
    block_mask: Any = None  # FlexAttention's, if that was chosen

    def __len__(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def gathered(self) -> int:
        """Keys beyond the rows themselves: none."""
        return 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequencePlan:
        """The plan with its tensors on `device`; this one, resolved or not, if they are there."""
        if self.cu_seqlens.device == torch.device(device):
            return self

        def move(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, non_blocking=non_blocking)

        return dataclasses.replace(
            self,
            cu_seqlens=move(self.cu_seqlens),
            into_groups=_moved(self.into_groups, move),
            from_groups=_moved(self.from_groups, move),
            **UNRESOLVED,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what was resolved: it belongs to this process, and FlexAttention's mask can't be pickled."""
        return vars(self) | UNRESOLVED


UNRESOLVED: dict[str, Any] = dict.fromkeys(("choice", "chosen_under", "block_mask"))


def plan_sequences(lengths: Sequence[int] | np.ndarray) -> SequencePlan:
    """The plan of sequences of these lengths (rows, each at least 1), one after the other.

    Raises ArgumentError for lengths below 1.

    Example: three windows, the second one cut by the edge of its picture.
        >>> from mmpack.ops.attention import plan_sequences
        >>> plan = plan_sequences([4, 2, 4])
        >>> plan.cu_seqlens.tolist(), plan.runs, plan.groups
        ([0, 4, 6, 10], ((4, 1), (2, 1), (4, 1)), ((4, 2), (2, 1)))
        >>> plan.into_groups.order.tolist()
        [0, 1, 2, 3, 6, 7, 8, 9, 4, 5]
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.ndim != 1 or (lengths < 1).any():
        raise ArgumentError(
            "plan_sequences: lengths are whole numbers from 1 on, in one list. Fix: leave out empty sequences"
        )
    offsets = np.append(0, np.cumsum(lengths))
    groups, order = _by_length(lengths, offsets)
    full, mixed = _count_blocks(lengths, int(offsets[-1]))
    there = back = None
    if order is not None:
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        each = torch.arange(len(order) + 1, dtype=torch.int32)
        one, other = (torch.from_numpy(x.astype(np.int32)) for x in (order, place))
        there, back = Inverse(one, each), Inverse(other, each)
    return SequencePlan(
        rows=int(offsets[-1]),
        cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
        max_seqlen=int(lengths.max(initial=0)),
        runs=_runs(lengths),
        groups=groups,
        into_groups=there,
        from_groups=back,
        pairs=int((lengths * lengths).sum()),
        full_blocks=full,
        mixed_blocks=mixed,
    )


def _runs(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    starts = np.flatnonzero(np.diff(lengths, prepend=0))
    counts = np.diff(starts, append=len(lengths))
    return tuple(zip(lengths[starts].tolist(), counts.tolist(), strict=True))


def _by_length(
    lengths: np.ndarray, offsets: np.ndarray
) -> tuple[tuple[tuple[int, int], ...], np.ndarray | None]:
    """Groups of one length, in order of first use, and the rows in that order: None where they lie so."""
    sizes, first, group, counts = np.unique(
        lengths, return_index=True, return_inverse=True, return_counts=True
    )
    by_use = np.argsort(first)
    groups = tuple((int(sizes[g]), int(counts[g])) for g in by_use)
    rank = np.empty_like(by_use)
    rank[by_use] = np.arange(len(by_use))
    sequences = np.argsort(rank[group], kind="stable")
    if (np.diff(sequences) == 1).all():
        return groups, None
    starts = offsets[:-1][sequences]
    sizes = lengths[sequences]
    before = np.cumsum(sizes) - sizes
    return groups, np.arange(sizes.sum()) + np.repeat(starts - before, sizes)


def _count_blocks(lengths: np.ndarray, rows: int) -> tuple[int, int]:
    """How many blocks of FLEX_BLOCK² are seen in full, and in part."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.arange(0, rows, FLEX_BLOCK)
    first, last = owner[starts], owner[np.minimum(starts + FLEX_BLOCK, rows) - 1]
    seen = (np.searchsorted(first, last, "right") - np.searchsorted(last, first)).sum()
    whole = np.bincount(first[(first == last) & (starts + FLEX_BLOCK <= rows)])
    full = (whole * whole).sum()
    return int(full), int(seen - full)


def _moved(inverse: Inverse | None, move: Callable[[torch.Tensor], torch.Tensor]) -> Inverse | None:
    return None if inverse is None else Inverse(*map(move, inverse))
