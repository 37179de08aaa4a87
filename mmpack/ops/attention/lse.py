"""Log-sum-exp of a row's scores, and what it is for: partial attentions, over different keys, merged exactly.

Natural logs, [B, heads, T], float32 (float64 for float64): log of the sum over the keys k that row q sees of
exp(scale · q · k). -inf for a row that sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.attention.rule import Rule
from mmpack.ops.attention.sequence_plan import SequencePlan
from mmpack.ops.inputs import check_tensors

ROWS = 256  # of queries, whose scores are held at a time
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attentions of the same queries over disjoint parts of the keys.

    out = Σ exp(lseᵢ - lse) · outᵢ with lse = log Σ exp(lseᵢ) (Rabe and Staats, 2021, arXiv:2112.05682, whose chunks
    carry the sums themselves).

    Args: outs: each [B, T, heads, d], lses: each [B, heads, T], as `tree_attention` and `sequence_attention` return
    them with `return_lse`. What is -inf counts nothing, whatever its row of `out` holds.

    Returns: out [B, T, heads, d] in the dtype of the first, summed in float32 (float64 for float64) in the order of the
    list, and lse [B, heads, T]. A row that no part sees gets 0 and -inf. Differentiable, by both.

    Raises ArgumentError for lists of other lengths, shapes, dtypes and devices that don't fit each other.

    Example: two keys, one at a time.
        >>> import torch
        >>> from mmpack.ops.attention import merge_attention
        >>> outs = [torch.full((1, 1, 1, 2), v) for v in (1.0, 3.0)]
        >>> out, lse = merge_attention(outs, [torch.zeros(1, 1, 1)] * 2)
        >>> out.tolist(), round(float(lse), 4)
        ([[[[2.0, 2.0]]]], 0.6931)
    """
    outs, lses = _check_parts(outs, lses)
    stacked = torch.stack(tuple(lses))
    highest = stacked.detach().amax(0)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(stacked - highest)
    total = weights.sum(0)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    merged = torch.zeros((), dtype=total.dtype, device=total.device)
    for out, weight in zip(outs, weights / total, strict=True):
        share = weight.transpose(1, 2)[..., None]
        merged = merged + torch.where(share > 0, share * out.to(total.dtype), 0.0)
    return merged.to(outs[0].dtype), torch.where(seen, highest + total.log(), -torch.inf)


def with_gradient(
    lse: Tensor, query: Tensor, key: Tensor, attend: Attend, scale: float | None
) -> Tensor:
    """`lse` [B, heads, T] with its gradient to query and key, [B, heads, T, d].

    d lse / d q is the attention of q whose values are the keys, times scale; d lse / d k is the gradient of that
    attention to its values. So one more forward and backward of the same kernel give them, and kernels that know no
    gradient of their log-sum-exp need none.

    Args: `attend`: query, key, value -> [B, T, heads, d].
    """
    if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return lse.detach()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _WithGradient.apply(lse.detach(), query, key, attend, scale)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lse: Tensor, query: Tensor, key: Tensor, attend: Attend, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.attend, ctx.scale = attend, scale
        return lse.view_as(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key = (x.detach() for x in ctx.saved_tensors)
        values = key.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.attend(query, key, values)
        weight = (ctx.scale * grad)[..., None]
        up = (weight * query).to(query.dtype).transpose(1, 2)
        (to_key,) = torch.autograd.grad(out, values, up)
        to_query = (weight * out.detach().transpose(1, 2)).to(query.dtype)
        return None, to_query, to_key, None, None


@torch.no_grad()
def by_rule(query: Tensor, key: Tensor, rule: Rule, scale: float | None) -> Tensor:
    """Written out, for torch's sdpa, which gives none: [B, heads, T] from scores of ROWS queries at a time.

    query [B, heads, T, d], key [B, kv heads, T, d].
    """
    width = query.shape[2]
    # one program for packs of any length, as in sdpa
    step = max(width, 1) if torch.compiler.is_compiling() else ROWS
    out = []
    for start in range(0, max(width, 1), step):
        stop = min(start + step, width)
        mask = rule.mask(start, stop)
        keys = key[:, :, : mask.shape[-1]]
        out.append(_of_scores(query[:, :, start:stop], keys, scale, mask[:, None]))
    return torch.cat(out, dim=2)


@torch.no_grad()
def by_sequence(query: Tensor, key: Tensor, plan: SequencePlan, scale: float | None) -> Tensor:
    """The same within sequences: query [T, heads, d], key [T, kv heads, d] -> [heads, T]."""
    out = [query.new_empty(query.shape[1], 0, dtype=_dtype(query))]
    first = 0
    for length, count in plan.runs:
        at_once = max(ROWS // length, 1) * length
        whole = first + length * count
        for start in range(first, whole, at_once):
            stop = min(start + at_once, whole)
            q, k = (x[start:stop].unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key))
            parts = [_of_scores(rows, k, scale) for rows in q.split(ROWS, dim=2)]
            out.append(torch.cat(parts, dim=2).transpose(0, 1).flatten(1))
        first = whole
    return torch.cat(out, dim=1)


def _of_scores(
    query: Tensor, key: Tensor, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """query [B, heads, R, d], key [B, kv heads, K, d], mask [B, 1, R, K] -> [B, heads, R]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.to(_dtype(query))
    grouped = query.to(key.dtype).unflatten(1, (key.shape[1], -1))
    with torch.autocast(query.device.type, enabled=False):
        scores = scale * (grouped @ key.mT[:, :, None]).flatten(1, 2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.logsumexp(scores, dim=-1)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check_parts(outs: Any, lses: Any) -> tuple[list[Tensor], list[Tensor]]:
    what = "merge_attention"
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence):
            raise ArgumentError(f"{what}: {name} is {kind_of(parts)}. Fix: pass a list of tensors")
    if len(outs) != len(lses) or not outs:
        raise ArgumentError(
            f"{what}: there are {len(outs)} outs and {len(lses)} lses. Fix: pass one of each per part, at least one"
        )
    named = {f"{n}[{i}]": x for n, xs in (("outs", outs), ("lses", lses)) for i, x in enumerate(xs)}
    check_tensors(what, (), **named)
    first = outs[0]
    if first.ndim != 4:
        raise ArgumentError(
            f"{what}: outs[0] has shape {list(first.shape)}, expected [B, T, heads, d]. "
            "Fix: pass what attention returned with return_lse=True"
        )
    lines, width, heads, _ = first.shape
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype != first.dtype or not out.is_floating_point():
            raise ArgumentError(
                f"{what}: outs[{i}] has shape {list(out.shape)} and dtype {out.dtype}, outs[0] {list(first.shape)} and "
                f"{first.dtype}. Fix: pass the outputs for the same queries"
            )
        if list(lse.shape) != [lines, heads, width] or lse.dtype != _dtype(first):
            raise ArgumentError(
                f"{what}: lses[{i}] has shape {list(lse.shape)} and dtype {lse.dtype}, expected "
                f"{[lines, heads, width]} and {_dtype(first)}. Fix: pass what return_lse=True gave with outs[{i}]"
            )
    return list(outs), list(lses)
