"""Attention of rows within their own sequence, both ways: the windows, pictures and frames of a vision tower."""

from __future__ import annotations

import torch

from mmpack.errors import ArgumentError, check_number
from mmpack.ops.attention.autocast import as_autocast
from mmpack.ops.attention.by_length import by_length
from mmpack.ops.attention.choose import SEQUENCES
from mmpack.ops.attention.sequence_plan import SequencePlan
from mmpack.ops.inputs import check_are_tensors


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SequencePlan,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax attention within each sequence of the plan, all of them in one launch; every backend computes the same.

    Args:
        query: [B, heads, S, d]; key, value: [B, kv heads, S, d]; the plan's T rows are B · S.
        plan: `plan_sequences(lengths)`, made once for all layers.
        scale: of the scores; d ** -0.5 if not given.
        dropout: of the weights, in [0, 1]; only sdpa has it.
        backend: a name of `choose.SEQUENCES.names`, instead of the one that MMPACK_TOWER_ATTENTION or cost chose.

    Returns [B, S, heads, d]. Under torch.use_deterministic_algorithms the gradients are the same bits every time.
    Autocast casts as it does for torch's own sdpa.

    Raises ArgumentError for shapes that don't fit, and numbers out of their range; BackendError for a backend that was
    asked for and can't run.
    """
    _check_arguments(query, key, value, plan, scale, dropout)
    lines, _, width, head_dim = query.shape
    query, key, value = as_autocast(query, key, value)
    if plan.choice is None or not torch.compiler.is_compiling():
        resolve_sequences(plan, query.device, head_dim, dropout)
    name = _backend(query, plan, dropout, backend)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if name == "sdpa" or plan.rows == 0:
        out = by_length(q, k, v, plan, scale, dropout)
    elif name == "flex":
        out = _by_blocks(q, k, v, plan, scale)
    else:
        from mmpack.ops.attention import varlen
        from mmpack.ops.attention.lengths import Lengths

        cu, longest = plan.cu_seqlens, plan.max_seqlen
        lengths = Lengths(cu, cu, longest, longest, causal=False)
        out = varlen.KERNELS[name](q, k, v, lengths, scale)
    return out.unflatten(0, (lines, width))


def resolve_sequences(
    plan: SequencePlan, device: torch.device, head_dim: int, dropout: float = 0.0
) -> None:
    """Fill in which backends run on `device`, and move there what they need.

    Does nothing if the plan was resolved under the same settings: MMPACK_TOWER_ATTENTION, determinism, head size,
    dropout. Raises BackendError where MMPACK_TOWER_ATTENTION names one that is unknown or can't run.
    """
    settings = SEQUENCES.settings(head_dim, dropout)
    if plan.cu_seqlens.device != device:
        vars(plan).update(vars(plan.to(device)))
    if plan.chosen_under == settings:
        return
    plan.choice = SEQUENCES.choices(plan, device, head_dim, dropout)
    plan.chosen_under = settings
    if "flex" in plan.choice.values():
        _make_blocks(plan)


def _backend(query: torch.Tensor, plan: SequencePlan, dropout: float, asked: str | None) -> str:
    """The one asked for, or that of the resolved plan. Raises BackendError where it can't run."""
    chosen = (plan.choice or {}).get(query.dtype)
    name = asked or chosen or SEQUENCES.wanted()
    if name != chosen:
        SEQUENCES.demand(name, query.device, query.dtype, query.shape[-1], dropout)
    return name


def _by_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SequencePlan, scale: float | None
) -> torch.Tensor:
    from mmpack.ops.attention.flex import flex

    _make_blocks(plan)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return flex(query, key, value, plan.block_mask, scale, flash=False)[0]


def _make_blocks(plan: SequencePlan) -> None:
    if plan.block_mask is None and plan.rows:
        from mmpack.ops.attention.flex import block_mask_of_sequences

        plan.block_mask = block_mask_of_sequences(plan)


def _check_arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SequencePlan,
    scale: float | None,
    dropout: float,
) -> None:
    tensors = {"query": query, "key": key, "value": value}
    check_are_tensors("sequence_attention", **tensors)
    for name, x in tensors.items():
        if x.ndim != 4 or x.shape[0] != query.shape[0] or x.shape[2] != query.shape[2]:
            raise ArgumentError(
                f"sequence_attention: {name} has shape {list(x.shape)}, query {list(query.shape)}, expected "
                "[B, heads, S, d]. Fix: pass heads before rows, as attention modules do"
            )
    if query.shape[0] * query.shape[2] != plan.rows:
        raise ArgumentError(
            f"sequence_attention: the plan is of {plan.rows} rows, there are {query.shape[0]} × {query.shape[2]}. "
            "Fix: plan_sequences of the lengths of these"
        )
    if scale is not None:
        check_number("sequence_attention", "scale", scale)
    check_number("sequence_attention", "dropout", dropout, least=0, most=1)
