"""Which row sees which: `visible_from[k] <= q < visible_until[k]`, and path(q) - path(k) < window where there is one.

Rows of a line, [1 or B, T]. A row's path is the rows above it in its tree and itself; path(q) counts them from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpack.ops.rows.inverse import Inverse

FLEX_BLOCK = 128  # rows and keys of FlexAttention's blocks


class Rule(NamedTuple):
    """The rule on a device, int [1 or B, T] each. Without the last three: k <= q < visible_until[k]."""

    until: Tensor
    start: Tensor | None = None  # visible_from; None: rows see nothing behind themselves
    path: Tensor | None = None  # of each row; given with `window`
    window: int | None = None

    def mask(self, first: int, stop: int) -> Tensor:
        """bool [1 or B, stop - first, K]: what these queries see of the first K rows, which are all that they see."""
        row = torch.arange(self.until.shape[1], device=self.until.device)
        q = row[first:stop, None]
        if self.start is None:
            seen = (row[None, :stop] <= q) & (q < self.until[:, None, :stop])
        else:
            seen = (self.start[:, None] <= q) & (q < self.until[:, None])
        if self.path is not None and self.window is not None:
            keys = self.path[:, None, : seen.shape[-1]]
            seen = seen & (self.path[:, first:stop, None] - keys < self.window)
        return seen


def blocks_of(rule: Rule) -> tuple[Tensor, Tensor]:
    """bool [1 or B, n, n]: FlexAttention's blocks that it has to mask, and those that are seen in full.

    A block of rows stands above one of keys. Made where the rule lies, and nothing waits for it.
    """
    until, start, path, window = rule
    ends = _by_block(until, 0)
    at = torch.arange(ends.shape[1], device=ends.device, dtype=ends.dtype)
    q = FLEX_BLOCK * at[:, None]
    if start is None:
        full = at[:, None] > at[None]
        seen = full | (at[:, None] == at[None])
    else:
        first = _by_block(start, torch.iinfo(start.dtype).max)
        seen = first.amin(2)[:, None] < q + FLEX_BLOCK
        full = first.amax(2)[:, None] <= q
    seen = seen & (q < ends.amax(2)[:, None])
    full = full & (q + FLEX_BLOCK <= ends.amin(2)[:, None])
    if path is not None and window is not None:
        places = _by_block(path, 0)
        seen = seen & (places.amin(2)[:, :, None] - places.amax(2)[:, None] < window)
        full = full & (places.amax(2)[:, :, None] - places.amin(2)[:, None] < window)
    return seen & ~full, seen & full


def _by_block(lines: Tensor, fill: int) -> Tensor:
    """[B, T] -> [B, blocks, FLEX_BLOCK]."""
    count = -(-lines.shape[1] // FLEX_BLOCK)
    padding = count * FLEX_BLOCK - lines.shape[1]
    padded = torch.nn.functional.pad(lines, (0, padding), value=fill)
    return padded.view(len(lines), count, FLEX_BLOCK)


class HostRule(NamedTuple):
    """A batch's arrays on the host, [T] or [B, S], from which plans of other rules are made."""

    until: np.ndarray
    start: np.ndarray | None  # visible_from
    padding: np.ndarray  # bool


class Lengths(NamedTuple):
    """S sequences of queries, and the keys of each; causal is bottom-right, else every query sees every key.

    `window`: a query sees no key so many places or more before itself. The last query stands at the last key.
    """

    cu_seqlens_q: Tensor  # [S+1] int32
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: int | None = None


class BlockPlan(NamedTuple):
    """Two-way blocks as sequences of R queries: each sees its path up to the block's end (within the window)."""

    rows: Tensor  # [R] int64, rising
    inverse: Inverse  # of rows
    cu_seqlens_q: Tensor  # [blocks + 1] int32
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_rows: Tensor  # [K] int32
    key_inverse: Inverse
    pairs: int  # of a query and a key that it sees


def path_of(until: np.ndarray) -> np.ndarray:
    """int32 [..., T] from visible_until [..., T]: rows above each row. Those that end at or before it don't see it."""
    lines = np.atleast_2d(until)
    row = np.arange(lines.shape[1])
    ended = [np.searchsorted(np.sort(line), row, side="right") for line in lines]
    above = row - np.asarray(ended).reshape(lines.shape)
    return above.reshape(np.shape(until)).astype(np.int32)


def path_on_device(until: Tensor) -> Tensor:
    """`path_of` of [1 or B, T], where it lies."""
    row = torch.arange(until.shape[1], device=until.device, dtype=until.dtype)
    ended = torch.searchsorted(
        until.sort(dim=1).values, row.expand_as(until).contiguous(), right=True
    )
    return (row - ended).to(torch.int32)
