"""What a pack's attention rule means for kernels: sequences for varlen kernels, blocks for FlexAttention.

Made on the host from `visible_until` alone, where rows are packed, so that nothing is asked of the GPU later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmpack.ops.gather_rows import Inverse

BLOCK = 128  # rows and keys of FlexAttention's blocks
PADDING_PIECE = 128  # rows of padding that are one sequence: they cost time, and nobody reads them


@dataclass
class AttentionPlan:
    """S sequences of adjacent rows, `rows` in all; each sees its path: the rows above it and itself.

    Sequence s has queries cu_seqlens_q[s] to cu_seqlens_q[s+1], and keys cu_seqlens_k[s] to cu_seqlens_k[s+1] of
    `key_rows`, in order; its last query stands at its last key (bottom-right causal). Rows of padding form sequences
    of their own, up to PADDING_PIECE rows each.
    """

    rows: int  # T of a packed batch, B·S of a padded one
    cu_seqlens_q: torch.Tensor  # [S+1] int32
    cu_seqlens_k: torch.Tensor  # [S+1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    key_rows: (
        torch.Tensor | None
    )  # [K] int32; None where no sequence has rows above it: keys are rows
    key_inverse: Inverse | None  # of key_rows
    pairs: int  # of a query and a key that it sees: what varlen kernels compute
    full_blocks: int  # BLOCK × BLOCK in which all is seen, and blocks with a mask: what FlexAttention computes
    mixed_blocks: int
    choice: dict[torch.dtype, str] | None = None  # queries' dtype -> backend; see `resolve`
    block_mask: Any = None  # FlexAttention's, if that was chosen

    def to(self, device: torch.device | str, non_blocking: bool = False) -> AttentionPlan:
        """The plan with its tensors on `device`; this one, resolved or not, if they are there."""
        if self.cu_seqlens_q.device == torch.device(device):
            return self
        moved: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                moved[f.name] = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, Inverse):
                moved[f.name] = Inverse(*(x.to(device, non_blocking=non_blocking) for x in value))
        return dataclasses.replace(self, **moved, choice=None, block_mask=None)

    def __getstate__(self) -> dict[str, Any]:
        """Without what was resolved: it is of this process, and a mask of FlexAttention can't be pickled."""
        return vars(self) | {"choice": None, "block_mask": None}


def plan_attention(visible_until: np.ndarray, padding: np.ndarray) -> AttentionPlan:
    """The plan of a batch.

    Args: `visible_until`: int [T] or [B, S], of segments in depth-first order: row q of a line sees its row k exactly
    if k <= q < visible_until[k]. `padding`: bool of the same shape, rows that hold no token.
    """
    lines = np.atleast_2d(visible_until).astype(np.int64)
    width = lines.shape[1]
    until = (lines + width * np.arange(len(lines))[:, None]).ravel()
    starts = _starts(until, padding.ravel())
    ends = np.append(starts[1:], len(until))
    above = _rows_above(until, starts, ends)
    queries = ends - starts
    upper = np.array([sum(b - a for a, b in path) for path in above])
    key_rows = inverse = None
    if upper.any():
        own = zip(starts, ends, strict=True)
        pieces = [p for path, last in zip(above, own, strict=True) for p in (*path, last)]
        rows = _ranges(np.array(pieces))
        key_rows = torch.from_numpy(rows.astype(np.int32))
        order = torch.from_numpy(np.argsort(rows, kind="stable").astype(np.int32))
        inverse = Inverse(order, _offsets(np.bincount(rows, minlength=len(until))))
    full, mixed = _count_blocks(lines)
    return AttentionPlan(
        rows=len(until),
        cu_seqlens_q=_offsets(queries),
        cu_seqlens_k=_offsets(queries + upper),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int((queries + upper).max()),
        key_rows=key_rows,
        key_inverse=inverse,
        pairs=int((queries * upper + queries * (queries + 1) // 2).sum()),
        full_blocks=full,
        mixed_blocks=mixed,
    )


def _starts(until: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Where a row does not see the row before it; of a run of padding, each PADDING_PIECE-th row instead."""
    rows = np.arange(len(until))
    new = np.append(True, until[:-1] <= rows[1:])
    padded = padding & np.append(False, padding[:-1])  # padding, and so is the row before
    run = np.maximum.accumulate(np.where(padded, 0, rows))
    return np.flatnonzero(np.where(padded, (rows - run) % PADDING_PIECE == 0, new))


def _rows_above(
    until: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> list[list[tuple[int, int]]]:
    """For each sequence the rows before its first that it sees, as ranges."""
    changes = np.flatnonzero(np.diff(until)) + 1
    cuts = np.union1d(starts, changes)
    stops = np.append(cuts[1:], len(until))
    first = np.searchsorted(cuts, starts)
    open_ranges: list[tuple[int, int, int]] = []  # start, stop, until; the last ends first
    out = []
    for s, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while open_ranges and open_ranges[-1][2] <= start:
            open_ranges.pop()
        out.append([(a, b) for a, b, _ in open_ranges])
        last = first[s + 1] if s + 1 < len(starts) else len(cuts)
        for a, b in zip(cuts[first[s] : last], stops[first[s] : last], strict=True):
            if until[a] > end:
                open_ranges.append((int(a), int(b), int(until[a])))
    return out


def _ranges(pieces: np.ndarray) -> np.ndarray:
    """The numbers of ranges [P, 2], one after the other."""
    lengths = pieces[:, 1] - pieces[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(pieces[:, 0] - before, lengths)


def _offsets(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))


def _count_blocks(lines: np.ndarray) -> tuple[int, int]:
    """Blocks that are seen in full, and in part. Below the diagonal, block i sees block j as far as j's rows say."""
    count = -(-lines.shape[1] // BLOCK)
    until = np.zeros((len(lines), count * BLOCK), dtype=np.int64)
    until[:, : lines.shape[1]] = lines
    until = until.reshape(len(lines), count, BLOCK)
    here = np.arange(count) + 1
    seen = np.maximum(-(-until.max(axis=2) // BLOCK) - here, 0).sum()
    full = np.maximum(until.min(axis=2) // BLOCK - here, 0).sum()
    return int(full), int(seen - full + until.shape[0] * count)
