"""Kernels that take sequences of unlike lengths: torch's, FlashAttention-2 and FlashAttention-4.

A shared pack becomes plain sequences too: queries are a branch, keys its path, gathered. Rows of several paths are
gathered several times; their gradients are summed in a fixed order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from mmpack.ops.attention.attention_plan import AttentionPlan
from mmpack.ops.rows.gather import gather_rows

Kernel = Callable[..., torch.Tensor]

# From torch 2.12 on, fewer heads of keys than of queries are to be announced.
_ASKED = "enable_gqa" in inspect.signature(varlen_attn).parameters
ANNOUNCED: dict[str, Any] = {"enable_gqa": True} if _ASKED else {}


def by_sequences(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scale: float | None,
) -> torch.Tensor:
    """query [B, heads, T, d], key and value [B, kv heads, T, d] -> [B, T, heads, d].

    `kernel` takes query [rows, heads, d], key and value [K, kv heads, d], plan, scale: causal, bottom-right.
    """
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if plan.key_rows is not None:
        k, v = (gather_rows(x, plan.key_rows, inverse=plan.key_inverse) for x in (k, v))
    out = kernel(q, k, v, plan, scale)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float | None
) -> torch.Tensor:
    """torch's own; deterministic under torch.use_deterministic_algorithms."""
    return varlen_attn(  # type: ignore[return-value]
        q,
        k,
        v,
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        scale=scale,
        window_size=(-1, 0),  # causal
        **ANNOUNCED,
    )


def flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float | None
) -> torch.Tensor:
    """FlashAttention-2, of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    out: torch.Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def flash_attn_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float | None
) -> torch.Tensor:
    """FlashAttention-4, of the package flash-attn-4."""
    return _flash_attn_4(
        q,
        k,
        v,
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        scale,
        torch.are_deterministic_algorithms_enabled(),
    )[0]


KERNELS: dict[str, Kernel] = {
    "varlen": torch_varlen,
    "flash_attn": flash_attn,
    "flash_attn_4": flash_attn_4,
}


# An op of ours, because the package's autograd.Function can't be traced by torch.compile.
@torch.library.custom_op("mmpack::flash_attn_4", mutates_args=())
def _flash_attn_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import (  # type: ignore[import-not-found]
        _flash_attn_fwd,
    )

    out, lse = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
    )[:2]
    return out, lse


@torch.library.custom_op("mmpack::flash_attn_4_backward", mutates_args=())
def _flash_attn_4_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import (  # type: ignore[import-not-found]
        _flash_attn_bwd,
    )

    dq, dk, dv = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
    )
    return dq, dk, dv


@_flash_attn_4.register_fake
def _(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_flash_attn_4_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    gradients = _flash_attn_4_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, None, None, None, None, None, None)


_flash_attn_4.register_autograd(_backward, setup_context=_keep)
