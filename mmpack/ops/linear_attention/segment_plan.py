"""What a forest of segments means for linear attention: waves of depth, and the rows before each row on its path.

Made on the host from the batch's segments, so that nothing is asked of the GPU later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from mmpack.errors import ArgumentError, check_whole
from mmpack.ops.linear_attention.chunk_plan import CHUNK, ChunkPlan, plan_chunks
from mmpack.ops.moving import Moving
from mmpack.ops.rows.inverse import Inverse

# rows of padding in one segment: a long one would cost steps, and padding is not read
PADDING_PIECE = 64


@dataclass
class Wave:
    """S segments of one depth, in row order: `rows` rows, adjacent in the plan's order."""

    rows: int
    cu_seqlens: torch.Tensor  # [S+1] int32, from 0
    chunk_indices: torch.Tensor  # [N, 2] int32: segment of the wave, chunk of CHUNK rows in it
    # [S] int32: each one's parent, as a place in the wave before; None in the first wave
    parents: torch.Tensor | None
    children: Inverse | None  # of parents


class FarReaders(NamedTuple):
    """Rows with a reader that does not follow them in the pack, as a prompt's last rows; and all readers of each."""

    rows: torch.Tensor  # [F] int32
    offsets: torch.Tensor  # [F+1] int32: row f's entries
    # int32: reader · conv_width + distance on the path; the row itself, at distance 0, comes first
    entries: torch.Tensor


@dataclass
class SegmentPlan(Moving):
    """T rows in G segments, runs of padding among them; none is empty. Numbers of rows are int32.

    Kernels run a wave at a time, over rows in `order`. `previous` says which rows a convolution reads.
    """

    rows: int
    offsets: np.ndarray  # [G+1] int64
    parents: np.ndarray  # [G] int64, -1 for a root
    depths: np.ndarray  # [G] int64
    waves: list[Wave]
    order: torch.Tensor | None  # [T] rows wave by wave; None where they lie so
    place: torch.Tensor | None  # [T] where each row stands in `order`
    # [T, conv_width - 1] the 1st, 2nd, … row before, on the path; -1 for none
    previous: torch.Tensor
    far: FarReaders
    chunks: dict[torch.device, ChunkPlan] = field(default_factory=dict, repr=False)
    checksum: int | None = None  # of the batch's visible_until, where it is a batch's

    unresolved: ClassVar[dict[str, Any]] = {"chunks": {}}

    @property
    def segments(self) -> int:
        return len(self.parents)

    @property
    def conv_width(self) -> int:
        return self.previous.shape[1] + 1

    @property
    def device(self) -> torch.device:
        return self.previous.device

    def chunk_plan(self) -> ChunkPlan:
        """What the rule in plain torch reads, on the plan's device; made when it is first asked for."""
        made = self.chunks.get(self.device)
        if made is None:
            made = plan_chunks(self.offsets, self.parents, self.depths).to(self.device)
            self.chunks[self.device] = made
        return made


def plan_segments(
    segment_offsets: np.ndarray,
    segment_parent: np.ndarray,
    padding: np.ndarray | None = None,
    conv_width: int = 4,
) -> SegmentPlan:
    """The plan of a batch.

    Args:
        segment_offsets: int [G+1] rows, from 0. A padded batch [B, S] has a segment per line, all roots.
        segment_parent: int [G], one before the segment, or -1.
        padding: bool of the batch's shape; True for rows that hold no token, before or after a segment's tokens and
            from segment_offsets[-1] on. They become roots of their own. None: no padding.
        conv_width: the convolution's K, or more.

    Raises ArgumentError for arrays that contradict each other, and for padding between tokens of a segment.

    Example: a prompt of two rows with two branches of one row.
        >>> import numpy as np
        >>> from mmpack.ops.linear_attention import plan_segments
        >>> plan = plan_segments(np.array([0, 2, 3, 4]), np.array([-1, 0, 0]), conv_width=3)
        >>> len(plan.waves), plan.waves[1].cu_seqlens.tolist(), plan.waves[1].parents.tolist()
        (2, [0, 1, 2], [0, 0])
        >>> plan.previous.tolist()
        [[-1, -1], [0, -1], [1, 0], [1, 0]]
    """
    check_whole("plan_segments", "conv_width", conv_width, fix="pass the convolution's K")
    offsets, parents, depths = normal_segments(segment_offsets, segment_parent, padding)
    lengths = np.diff(offsets)
    rows = int(offsets[-1])
    by_wave = np.argsort(np.repeat(depths, lengths), kind="stable")
    in_order = bool((by_wave == np.arange(rows)).all())
    place = np.empty_like(by_wave)
    place[by_wave] = np.arange(rows)
    previous = _previous(offsets, parents, conv_width)
    return SegmentPlan(
        rows=rows,
        offsets=offsets,
        parents=parents,
        depths=depths,
        waves=_waves(lengths, parents, depths),
        order=None if in_order else _int32(by_wave),
        place=None if in_order else _int32(place),
        previous=_int32(previous),
        far=_far(previous),
    )


def _waves(lengths: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> list[Wave]:
    out = []
    place = np.zeros_like(parents)  # of each segment in its wave
    for depth in range(int(depths.max(initial=-1)) + 1):
        here = np.flatnonzero(depths == depth)
        place[here] = np.arange(len(here))
        above = place[parents[here]] if depth else None
        chunks = -(-lengths[here] // CHUNK)
        within = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        pairs = np.stack([np.repeat(np.arange(len(here)), chunks), within], axis=1)
        count = int((depths == depth - 1).sum())
        out.append(
            Wave(
                rows=int(lengths[here].sum()),
                cu_seqlens=_int32(np.append(0, np.cumsum(lengths[here]))),
                chunk_indices=_int32(pairs),
                parents=None if above is None else _int32(above),
                children=None if above is None else _inverse(above, count),
            )
        )
    return out


def _previous(offsets: np.ndarray, parents: np.ndarray, width: int) -> np.ndarray:
    """[T, width - 1]"""
    rows = int(offsets[-1])
    last = np.append(offsets[1:] - 1, -1)  # of each segment; parent -1 reads the end
    before = np.append(np.arange(-1, rows - 1), -1)  # one more than rows: -1 reads the end
    before[offsets[:-1]] = last[parents]
    out = np.empty((rows, width - 1), dtype=np.int64)
    at = np.arange(rows)
    for tap in range(width - 1):
        at = before[at]
        out[:, tap] = at
    return out


def _far(previous: np.ndarray) -> FarReaders:
    """Far places of `previous` [T, width - 1]."""
    rows, taps = previous.shape
    # windows that are not the rows right before
    reader, tap = np.nonzero(previous != np.arange(rows)[:, None] - 1 - np.arange(taps))
    read = previous[reader, tap]
    far = np.unique(read[read >= 0])
    place = np.full(rows, -1)
    place[far] = np.arange(len(far))
    # all readers of those rows, near ones too; and the rows themselves
    reader, tap = np.nonzero((previous >= 0) & (place[previous] >= 0))
    reader, distance = np.append(far, reader), np.append(np.zeros_like(far), tap + 1)
    of = np.append(np.arange(len(far)), place[previous[reader[len(far) :], tap]])
    order = np.argsort(of, kind="stable")
    counts = np.bincount(of, minlength=len(far))
    entries = reader * (taps + 1) + distance
    return FarReaders(_int32(far), _int32(np.append(0, np.cumsum(counts))), _int32(entries[order]))


def _inverse(index: np.ndarray, count: int) -> Inverse:
    """Inverse of an index into `count` rows."""
    counts = np.bincount(index, minlength=count)
    order = np.argsort(index, kind="stable")
    return Inverse(_int32(order), _int32(np.append(0, np.cumsum(counts))))


def _int32(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32))


class Segments(NamedTuple):
    """G segments that cover T rows, none of them empty; int64. A parent comes before its children."""

    offsets: np.ndarray  # [G+1]
    parents: np.ndarray  # [G], -1 for a root
    depths: np.ndarray  # [G]


def normal_segments(
    segment_offsets: np.ndarray, segment_parent: np.ndarray, padding: np.ndarray | None
) -> Segments:
    """Arguments and errors as of `plan_segments`."""
    offsets, parents = _checked(segment_offsets, segment_parent)
    total = int(offsets[-1])
    padded = np.zeros(total, dtype=bool) if padding is None else np.asarray(padding).ravel()
    if padded.dtype != bool or len(padded) < total or not padded[total:].all():
        raise ArgumentError(
            f"plan_segments: padding is {padded.dtype} of {len(padded)} rows, but segments end at row {total}. "
            "Fix: pass one bool per row of the batch, True from the last segment's end on"
        )
    starts, stops = _without_padding(offsets, padded)
    parents = _nearest(parents, stops > starts)
    kept = np.flatnonzero(stops > starts)
    loose = _pieces(padded)
    starts = np.concatenate([starts[kept], loose])
    order = np.argsort(starts, kind="stable")
    number = np.full(len(offsets), -1)  # the last is what a root's parent, -1, becomes
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    number[kept] = at[: len(kept)]
    parents = np.concatenate([number[parents[kept]], np.full(len(loose), -1)])[order]
    depths = np.zeros(len(parents), dtype=np.int64)
    for g in np.flatnonzero(parents >= 0):
        depths[g] = depths[parents[g]] + 1
    return Segments(np.append(starts[order], len(padded)), parents, depths)


def _checked(
    segment_offsets: np.ndarray, segment_parent: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    offsets, parents = np.asarray(segment_offsets), np.asarray(segment_parent)
    if offsets.ndim != 1 or parents.ndim != 1 or len(offsets) != len(parents) + 1:
        raise ArgumentError(
            f"plan_segments: offsets have shape {list(offsets.shape)}, parents {list(parents.shape)}, expected "
            "[G+1] and [G]. Fix: pass batch.segment_offsets and batch.segment_parent"
        )
    for name, given in (("offsets", offsets), ("parents", parents)):
        if given.size and given.dtype.kind not in "iu":
            raise ArgumentError(
                f"plan_segments: {name} are {given.dtype}, expected integers. Fix: pass {name}.astype(np.int64)"
            )
    offsets, parents = offsets.astype(np.int64), parents.astype(np.int64)
    numbers = np.arange(len(parents))
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ArgumentError(
            "plan_segments: offsets must rise from 0. Fix: pass batch.segment_offsets"
        )
    wrong = np.flatnonzero((parents >= numbers) | (parents < -1))
    if len(wrong):
        g = int(wrong[0])
        raise ArgumentError(
            f"plan_segments: segment {g} has parent {parents[g]}, expected an earlier segment, or -1. "
            "Fix: pass batch.segment_parent"
        )
    return offsets, parents


def _without_padding(offsets: np.ndarray, padded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each segment's first token and the end of its last; equal where it has none."""
    before = np.append(0, np.cumsum(~padded))  # tokens before each row
    count = np.diff(before[offsets])
    tokens = np.append(np.flatnonzero(~padded), len(padded))
    first = tokens[np.minimum(before[offsets[:-1]], len(tokens) - 1)]
    starts = np.where(count > 0, first, offsets[:-1])
    stops = starts + count
    split = np.flatnonzero((count > 0) & (before[stops] - before[starts] != count))
    if len(split):
        g = int(split[0])
        raise ArgumentError(
            f"plan_segments: segment {g}, rows {offsets[g]} to {offsets[g + 1]}, has padding between tokens. "
            "Fix: put padding before or after a segment's tokens"
        )
    return starts, stops


def _nearest(parents: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Parents without those that are not kept: their own stand in."""
    if kept.all():
        return parents
    parents = parents.copy()
    for g in np.flatnonzero(parents >= 0):
        parent = parents[g]  # of its parent it is known already
        parents[g] = parent if kept[parent] else parents[parent]
    return parents


def _pieces(padded: np.ndarray) -> np.ndarray:
    """First rows of pieces of padding."""
    rows = np.arange(len(padded))
    goes_on = padded & np.append(False, padded[:-1])[: len(padded)]
    run = np.maximum.accumulate(np.where(goes_on, 0, rows)) if len(rows) else rows
    return np.flatnonzero(padded & ((rows - run) % PADDING_PIECE == 0))
