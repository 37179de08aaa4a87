"""The gated delta rule in plain torch, chunk by chunk, all segments of a wave at once.

For a head with state S [Dk, Dv]: S = exp(g)·S; S += k ⊗ (beta·(v − kᵀS)); out = qᵀS. Within a chunk that is a
triangular system (Yang et al. 2024, "Gated Delta Networks", section 3.3); states go from chunk to chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.ops.linear_attention.chunk_plan import CHUNK, ChunkPlan

EPS = 1e-6  # of the norm of queries and keys, as FLA and transformers have it


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: ChunkPlan,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Shapes as of `segment_delta_rule`. States are float32, or float64 where an input is."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    for x in (k, v, g, beta):
        dtype = torch.promote_types(dtype, x.dtype)
    out_dtype, group = q.dtype, v.shape[1] // q.shape[1]
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
    q, k, v, g, beta = (_spread(x, chunks) for x in (q * scale, k, v, g, beta))
    # [N, Hv, CHUNK] in float64: between rows after a strong decay, float32 would lose what differences are made of.
    total = g.double().cumsum(-1)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).to(dtype)
    decay = between.masked_fill(upper, -torch.inf).exp()
    since, until = total.to(dtype).exp(), (total[..., -1:] - total).to(dtype).exp()
    attend = _per_value_head(q @ k.mT, group) * decay
    system = _per_value_head(k @ k.mT, group) * beta[..., None] * decay
    q, k = _per_value_head(q, group), _per_value_head(k, group)
    # What each row writes: from its chunk alone, and minus that times the state before the chunk.
    known = torch.cat([v, k * since[..., None]], -1) * beta[..., None]
    writes = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    writes, reads = writes.split([v.shape[-1], k.shape[-1]], -1)
    q, k = q * since[..., None], k * until[..., None]
    out = _scan(q, k, writes, reads, attend, since[..., -1, None, None], chunks)
    rows: Tensor = _Collect.apply(out.transpose(1, 2).flatten(0, 1), chunks.rows, chunks.places)
    return rows.to(out_dtype)


def _scan(
    q: Tensor, k: Tensor, writes: Tensor, reads: Tensor, attend: Tensor, decay: Tensor,
    chunks: ChunkPlan,
) -> Tensor:  # fmt: skip
    """Outputs of all chunks [N, Hv, CHUNK, Dv]."""
    out, at = [], 0
    last = None  # states after the wave before, [S, Hv, Dk, Dv]
    for steps, parents in zip(chunks.steps, chunks.parents, strict=True):
        if last is None or parents is None:
            state = q.new_zeros(steps[0], q.shape[1], q.shape[-1], writes.shape[-1])
        else:
            state = last.index_select(0, parents)
        ended = []
        for step, count in enumerate(steps):
            here = slice(at, at + count)
            if step and count < steps[step - 1]:
                ended.append(state[count:])
                state = state[:count]
            write = writes[here] - reads[here] @ state
            out.append(q[here] @ state + attend[here] @ write)
            state = state * decay[here] + k[here].mT @ write
            at += count
        last = torch.cat([state, *reversed(ended)])
    return torch.cat(out) if out else torch.empty_like(writes)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _per_value_head(x: Tensor, group: int) -> Tensor:
    """[N, Hk, …] -> [N, Hk·group, …]: head h of the keys serves `group` adjacent heads of values."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _spread(x: Tensor, chunks: ChunkPlan) -> Tensor:
    """[T, H, …] -> [N, H, CHUNK, …], zeros where no row is."""
    spread: Tensor = _Spread.apply(x, chunks.rows, chunks.places)
    return spread.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()


class _Spread(torch.autograd.Function):
    """Rows to their places, zeros elsewhere; its transpose is _Collect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Collect.apply(grad, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    """Rows from their places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Spread.apply(grad, *ctx.saved_tensors), None, None
