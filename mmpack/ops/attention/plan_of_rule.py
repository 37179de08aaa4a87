"""Plans of other rules than `visible_until` alone: a window along the path, two-way blocks, or both.

Made on the host from what a batch's plan keeps there, once per rule; what is new goes to where that plan is, and
nothing is asked of a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch

from mmpack.errors import ArgumentError, check_whole
from mmpack.ops.attention.attention_plan import AttentionPlan, Pieces, offsets_of, ranges, starts_of
from mmpack.ops.attention.rule import BlockPlan, Rule, blocks_of, path_of
from mmpack.ops.moving import moved_to
from mmpack.ops.rows.inverse import inverse_index


def plan_of_rule(
    plan: AttentionPlan, window: int | None = None, two_way: bool = False
) -> AttentionPlan:
    """The plan for layers in which row q sees row k only if path(q) - path(k) < window.

    Args:
        plan: `plan_attention`'s, or a batch's, on any device.
        window: rows, at least 1; None: no window. One that is longer than all paths leaves everything as it is.
        two_way: rows of a block see each other, later ones too: row q sees row k if visible_from[k] <= q.

    Raises ArgumentError for a window below 1, a plan that was made here, or two-way blocks of a plan that has no
    visible_from.

    Example: a window of two rows, in a prompt of three rows with two branches of one row.
        >>> import numpy as np
        >>> from mmpack.ops.attention import plan_attention, plan_of_rule
        >>> plan = plan_attention(np.array([5, 5, 5, 4, 5]), np.zeros(5, dtype=bool))
        >>> plan_of_rule(plan, window=2).key_rows.tolist()
        [0, 1, 2, 3, 2, 4]
    """
    if window is not None:
        check_whole("plan_of_rule", "window", window)
    if plan.host is None or plan.window is not None or plan.two_way:
        raise ArgumentError(
            "plan_of_rule: the plan was made for a rule already. "
            "Fix: pass batch.attention_plan, or what plan_attention returned"
        )
    if two_way and plan.host.start is None:
        raise ArgumentError(
            "plan_of_rule: the plan has no two-way blocks. "
            "Fix: make it by plan_attention(visible_until, padding, visible_from)"
        )
    key = window, two_way
    if key not in plan.made:
        plan.made[key] = _made(plan, window, two_way)
    return dataclasses.replace(plan.made[key])


def _made(plan: AttentionPlan, window: int | None, two_way: bool) -> AttentionPlan:
    assert plan.host is not None
    until = np.atleast_2d(plan.host.until).astype(np.int64)
    path = path_of(until)
    start = None if plan.host.start is None or not two_way else np.atleast_2d(plan.host.start)
    if start is not None and (start == np.arange(until.shape[1])).all():
        start = None
    counts = None if window is None or window > path.max(initial=0) else window
    own = {"window": window, "two_way": two_way} | plan.unresolved | {"made": {}}
    if start is None and counts is None:
        return dataclasses.replace(plan, **own)
    sequences = _Sequences.of(until, plan.host.padding)
    first = None if start is None else torch.tensor(start)
    rule = Rule(torch.tensor(until), first, torch.tensor(path), counts)
    mixed, full = blocks_of(rule)
    new: dict[str, Any] = {"pairs": plan.pairs}
    if counts is not None:
        new = _in_window(plan, sequences, counts)
        new["path"] = torch.from_numpy(path.reshape(plan.host.until.shape))
    if start is not None:
        new["blocks"] = _blocks(start, path, sequences, counts)
        new["pairs"] += new["blocks"].pairs
    device = plan.cu_seqlens_q.device
    new = {n: moved_to(x, lambda x: x.to(device, non_blocking=True)) for n, x in new.items()}
    return dataclasses.replace(
        plan, **own, **new, full_blocks=int(full.sum()), mixed_blocks=int(mixed.sum())
    )


class _Sequences(NamedTuple):
    """The sequences of all lines, and their keys before any is left out."""

    first: np.ndarray  # [S] row
    queries: np.ndarray  # [S]
    keys: np.ndarray  # [S]
    ends: np.ndarray  # [S] of its keys in key_rows
    key_rows: np.ndarray  # [sum of keys]

    @classmethod
    def of(cls, lines: np.ndarray, padding: np.ndarray) -> _Sequences:
        until = (lines + lines.shape[1] * np.arange(len(lines))[:, None]).ravel()
        first = starts_of(until, padding.ravel())
        pieces = Pieces(until, first)
        keys = np.bincount(pieces.reader, pieces.length, minlength=len(first)).astype(np.int64)
        queries = np.diff(first, append=len(until))
        return cls(first, queries, keys, np.cumsum(keys), pieces.rows())


def _in_window(plan: AttentionPlan, sequences: _Sequences, window: int) -> dict[str, Any]:
    """Fields of the plan without the keys before the window of a sequence's first query, where keys are gathered."""
    _, queries, keys, ends, key_rows = sequences
    seen = _seen_in_turn(keys, window) - _seen_in_turn(keys - queries, window)
    if plan.key_rows is None:
        return {"pairs": int(seen.sum())}
    kept = np.minimum(keys, queries + window - 1)
    index = torch.from_numpy(key_rows[ranges(ends - kept, kept)].astype(np.int32))
    return {
        "pairs": int(seen.sum()),
        "key_rows": index,
        "key_inverse": inverse_index(index, plan.rows),
        "cu_seqlens_k": offsets_of(kept),
        "max_seqlen_k": int(kept.max(initial=0)),
    }


def _blocks(
    start: np.ndarray, path: np.ndarray, sequences: _Sequences, window: int | None
) -> BlockPlan:
    """The blocks of two rows or more; each lies in one sequence, and its keys are the first of that sequence's."""
    lines, width = start.shape
    owner = (start + width * np.arange(lines, dtype=np.int64)[:, None]).ravel()
    first, counts = np.unique(owner, return_counts=True)
    first, counts = first[counts > 1], counts[counts > 1]
    of = np.searchsorted(sequences.first, first, side="right") - 1
    above = path.ravel()[first].astype(np.int64)  # keys before the block
    length = above + counts
    kept = length if window is None else np.minimum(length, counts + window - 1)
    begin = sequences.ends[of] - sequences.keys[of]
    key_rows = sequences.key_rows[ranges(begin + length - kept, kept)]
    rows = torch.from_numpy(ranges(first, counts))
    index = torch.from_numpy(key_rows.astype(np.int32))
    lost = np.zeros_like(length)
    if window is not None:
        # query i of a block leaves out max(0, above + i - window + 1) keys
        low = above - window + 1
        last = np.maximum(low + counts - 1, 0)
        before = np.maximum(low, 1) - 1
        lost = last * (last + 1) // 2 - before * (before + 1) // 2
    return BlockPlan(
        rows=rows,
        inverse=inverse_index(rows, lines * width),
        cu_seqlens_q=offsets_of(counts),
        cu_seqlens_k=offsets_of(kept),
        max_seqlen_q=int(counts.max(initial=0)),
        max_seqlen_k=int(kept.max(initial=0)),
        key_rows=index,
        key_inverse=inverse_index(index, lines * width),
        pairs=int((counts * length - lost).sum()),
    )


def _seen_in_turn(count: np.ndarray, window: int) -> np.ndarray:
    """Pairs of the first `count` rows of a path: row i sees min(i + 1, window) rows."""
    short = np.minimum(count, window)
    return short * (short + 1) // 2 + (count - short) * window
