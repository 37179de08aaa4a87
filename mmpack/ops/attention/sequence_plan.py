"""What attention within sequences means for kernels: offsets, equal lengths side by side, blocks for FlexAttention.

Made on the host from the sequences' lengths, once per forward of a vision tower, so that nothing is asked of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.attention.attention_plan import UNRESOLVED, ranges
from mmpack.ops.moving import Moving
from mmpack.ops.rows.inverse import Inverse


@dataclass
class SequencePlan(Moving):
    """S sequences of adjacent rows, T in all; every row sees all rows of its own sequence, and no other."""

    rows: int  # T
    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int
    runs: tuple[tuple[int, int], ...]  # (length, how many) of adjacent sequences of one length
    groups: tuple[tuple[int, int], ...]  # the same of all sequences of one length
    # Both ways between the rows and the rows group by group; None where the rows lie so.
    into_groups: Inverse | None
    from_groups: Inverse | None
    pairs: int  # of a query and a key that it sees
    choice: dict[torch.dtype, str] | None = (
        None  # queries' dtype -> backend; see `resolve_sequences`
    )
    chosen_under: tuple[Any, ...] | None = None  # the settings that `choice` holds for
    block_mask: Any = None  # FlexAttention's, if that was chosen
    # What costs of packed rows count in addition: see `Backend`.
    gathered: ClassVar[int] = 0
    full_blocks: ClassVar[int] = 0
    mixed_blocks: ClassVar[int] = 0
    windowed: ClassVar[bool] = False
    unresolved: ClassVar[dict[str, Any]] = UNRESOLVED

    @property
    def sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device


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
            "plan_sequences: expected lengths as one list of whole numbers, 1 or more. Fix: leave out empty sequences"
        )
    offsets = np.append(0, np.cumsum(lengths))
    groups, order = _by_length(lengths, offsets)
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
    )


def plan_tiles(count: int, length: int, device: torch.device | str) -> SequencePlan:
    """The plan of `count` sequences of one length. Nothing is copied to `device`, so torch.compile can trace it."""
    rows = count * length
    cu_seqlens = torch.arange(0, rows + 1, max(length, 1), device=device, dtype=torch.int32)
    return SequencePlan(
        rows=rows,
        cu_seqlens=cu_seqlens,
        max_seqlen=length,
        runs=((length, count),),
        groups=((length, count),),
        into_groups=None,
        from_groups=None,
        pairs=rows * length,
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
    return groups, ranges(starts, sizes)
