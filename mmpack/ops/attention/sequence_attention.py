"""Attention of rows within their own sequence, both ways: the windows, pictures and frames of a vision tower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.attention.choose import SEQUENCES
from mmpack.ops.attention.lse import by_sequence, with_gradient
from mmpack.ops.attention.operands import as_autocast, check_operands
from mmpack.ops.attention.sequence_plan import SequencePlan
from mmpack.ops.attention.without_cudnn import attend
from mmpack.ops.rows.gather import gather_rows


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: SequencePlan,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention within each sequence of the plan, all of them in one launch; every backend computes the same.

    Args:
        query: [B, heads, S, d]; key, value: [B, kv heads, S, d]; the plan's T rows are B · S.
        plan: `plan_sequences(lengths)`, made once for all layers.
        scale: of the scores; d ** -0.5 if not given.
        dropout: of the weights, in [0, 1]; only sdpa has it.
        backend: a name of `choose.SEQUENCES.names`, instead of the one that MMPACK_TOWER_ATTENTION or cost chose.
        return_lse: also the log-sum-exp of each row's scores; every backend gives it.

    Returns [B, S, heads, d], and with `return_lse` also [B, heads, S], as `tree_attention` does. Under
    torch.use_deterministic_algorithms the gradients are the same bits every time. Autocast casts as it does for torch's
    own sdpa.

    Raises ArgumentError for shapes that don't fit, and numbers out of their range; BackendError for a backend that was
    asked for and can't run.
    """
    tensors = {"query": query, "key": key, "value": value}
    check_operands("sequence_attention", tensors, scale, dropout)
    _check_rows(query, plan)
    query, key, value = as_autocast(query, key, value)
    if plan.choice is None or not torch.compiler.is_compiling():
        resolve_sequences(plan, query.device, query.shape[-1], dropout)
    name = SEQUENCES.picked(plan, query, dropout, backend)
    out, lse = _attend(name, query, key, value, plan, scale, dropout, return_lse)
    if lse is None:
        return out

    def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(name, q, k, v, plan, scale, 0.0)[0]

    return out, with_gradient(lse, query, key, again, scale)


def _attend(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: SequencePlan,
    scale: float | None,
    dropout: float,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """By this backend: [B, S, heads, d], and log-sum-exp [B, heads, S] where it is asked for."""
    lines = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    lse: Tensor | None = None
    if name == "sdpa" or plan.rows == 0:
        out = by_length(q, k, v, plan, scale, dropout)
        if return_lse:
            lse = by_sequence(q, k, plan, scale)
    elif name == "flex":
        out, lse = _by_blocks(q, k, v, plan, scale, return_lse)
    else:
        from mmpack.ops.attention import varlen
        from mmpack.ops.attention.rule import Lengths

        cu, longest = plan.cu_seqlens, plan.max_seqlen
        lengths = Lengths(cu, cu, longest, longest, causal=False)
        made = varlen.KERNELS[name](q, k, v, lengths, scale, return_lse=return_lse)
        out, lse = made if return_lse else (made, None)
    if lse is not None:
        lse = lse.unflatten(1, lines).transpose(0, 1)
    return out.unflatten(0, lines), lse


def resolve_sequences(
    plan: SequencePlan, device: torch.device, head_dim: int, dropout: float = 0.0
) -> None:
    """Fill in which backends run on `device`, and move there what they need.

    Does nothing if the plan was resolved under the same settings: MMPACK_TOWER_ATTENTION, determinism, head size,
    dropout. Raises BackendError where MMPACK_TOWER_ATTENTION names one that is unknown or can't run.
    """
    if "flex" in SEQUENCES.resolve(plan, device, head_dim, dropout):
        _make_blocks(plan)


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, plan: SequencePlan, scale: float | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    from mmpack.ops.attention.flex import flex

    _make_blocks(plan)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = flex(query, key, value, plan.block_mask, scale, False, return_lse=return_lse)
    return out[0], None if lse is None else lse[0]


def _make_blocks(plan: SequencePlan) -> None:
    if plan.block_mask is None and plan.rows:
        from mmpack.ops.attention.flex import block_mask_of_sequences

        plan.block_mask = block_mask_of_sequences(plan)


def by_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SequencePlan,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q [T, heads, d], k and v [T, kv heads, d] -> [T, heads, d].

    On a CPU sequences are batched as they lie: moving rows costs more than calls do. Elsewhere all of one length are
    brought together first; windows have few lengths (whole ones, those at an edge of the picture, the corner).
    """
    if q.device.type == "cpu":
        return _batched(q, k, v, plan.runs, scale, dropout)
    return brought_together(q, k, v, plan, scale, dropout)


def brought_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SequencePlan,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`by_length` with rows moved, there and back, unless all of one length lie together already."""
    there, back = plan.into_groups, plan.from_groups
    if there is None or back is None:
        return _batched(q, k, v, plan.groups, scale, dropout)
    q, k, v = (gather_rows(x, there.order, inverse=back) for x in (q, k, v))
    rows = _batched(q, k, v, plan.groups, scale, dropout)
    return gather_rows(rows, back.order, inverse=there)


def _batched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batches: tuple[tuple[int, int], ...],
    scale: float | None,
    dropout: float,
) -> Tensor:
    """One call for each (length, how many) of adjacent sequences."""
    batches = batches or ((0, 1),)
    sizes = [length * count for length, count in batches]
    # Not slices: each of their gradients would be as long as the whole.
    pieces = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    out = []
    for (length, count), piece in zip(batches, pieces, strict=True):
        query, key, value = (x.unflatten(0, (count, length)).transpose(1, 2) for x in piece)
        heads_first = attend(
            query, key, value, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out.append(heads_first.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


def _check_rows(query: Tensor, plan: SequencePlan) -> None:
    if query.shape[0] * query.shape[2] != plan.rows:
        raise ArgumentError(
            f"sequence_attention: the plan is for {plan.rows} rows, but there are {query.shape[0]} × {query.shape[2]}. "
            "Fix: call plan_sequences with these sequences' lengths"
        )
