"""Sequences of one length as one batched call of torch's own sdpa, without a mask: any device and dtype."""

from __future__ import annotations

import torch

from mmpack.ops.attention.sequence_plan import SequencePlan
from mmpack.ops.attention.without_cudnn import attend
from mmpack.ops.rows.gather import gather_rows


def by_length(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SequencePlan,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """q [T, heads, d], k and v [T, kv heads, d] -> [T, heads, d].

    On a CPU sequences are batched as they lie: moving rows costs more than calls do. Elsewhere all of one length are
    brought together first; windows have few lengths (whole ones, those at an edge of the picture, the corner).
    """
    if q.device.type == "cpu":
        return _batched(q, k, v, plan.runs, scale, dropout)
    return brought_together(q, k, v, plan, scale, dropout)


def brought_together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SequencePlan,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`by_length` with rows moved, there and back, unless all of one length lie together already."""
    there, back = plan.into_groups, plan.from_groups
    if there is None or back is None:
        return _batched(q, k, v, plan.groups, scale, dropout)
    q, k, v = (gather_rows(x, there.order, inverse=back) for x in (q, k, v))
    rows = _batched(q, k, v, plan.groups, scale, dropout)
    return gather_rows(rows, back.order, inverse=there)


def _batched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batches: tuple[tuple[int, int], ...],
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """One call for each (length, how many) of adjacent sequences."""
    batches = batches or ((0, 1),)
    sizes = [length * count for length, count in batches]
    # Not slices: each of their gradients would be as long as the whole.
    pieces = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    out = []
    for (length, count), piece in zip(batches, pieces, strict=True):
        query, key, value = (x.unflatten(0, (count, length)).transpose(1, 2) for x in piece)
        heads_first = attend(
            query,
            key,
            value,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out.append(heads_first.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)
