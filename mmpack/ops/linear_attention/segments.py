"""The segments that run: given ones [G] without what is empty, and runs of padding as roots of their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmpack.errors import ArgumentError

# rows of padding in one segment: a long one would cost steps, and padding is not read
PADDING_PIECE = 64


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
