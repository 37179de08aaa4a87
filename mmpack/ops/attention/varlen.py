"""Kernels that take sequences of different lengths: torch's, FlashAttention-2 and FlashAttention-4, fixed blocks.

A shared pack becomes plain sequences too: the queries are a branch, the keys its path, gathered. A row of several paths
is gathered several times; its gradients are summed in a fixed order. Two-way blocks are a second launch, not causal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from mmpack.ops.attention.attention_plan import AttentionPlan
from mmpack.ops.attention.choose import ROUNDED_TWO_WAYS
from mmpack.ops.attention.fixed_blocks.attend import fixed_blocks
from mmpack.ops.attention.rule import BlockPlan, Lengths
from mmpack.ops.custom_op import define_op, distinct_views
from mmpack.ops.first_use import flash_attn_4_interface
from mmpack.ops.records import Size
from mmpack.ops.rows.gather import gather_rows

# Out [rows, heads, d], or with return_lse that and log-sum-exp [heads, rows], whose own gradient nobody may ask for.
Kernel = Callable[..., Any]

# Since torch 2.12 fewer heads of keys than of queries need this flag.
_HAS_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if _HAS_FLAG else {}


def by_sequences(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float | None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """query [B, heads, T, d], key and value [B, kv heads, T, d] -> [B, T, heads, d], log-sum-exp [B, heads, T] or None.

    `kernel` takes query [rows, heads, d], key and value [K, kv heads, d], their lengths, scale.
    """
    rows = _rows(query, key, value)
    options = {"return_lse": True} if return_lse else {}
    found = kernel(*_operands(*rows, plan), scale, **options)
    out, lse = found if return_lse else (found, None)
    if plan.blocks is not None:
        found = kernel(*_of_blocks(*rows, plan.blocks, _window(plan)), scale, **options)
        of_blocks, their_lse = found if return_lse else (found, None)
        out = out.index_copy(0, plan.blocks.rows, of_blocks)
        lse = None if lse is None else lse.index_copy(1, plan.blocks.rows, their_lse)
    lines = query.shape[0], query.shape[2]
    lse = None if lse is None else lse.unflatten(1, lines).transpose(0, 1)
    return out.unflatten(0, lines), lse


Rows = tuple[Tensor, Tensor, Tensor]
Operands = tuple[Tensor, Tensor, Tensor, Lengths]


def _rows(query: Tensor, key: Tensor, value: Tensor) -> Rows:
    """[B, heads, T, d] each -> [B · T, heads, d]."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return q, k, v


def _operands(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Operands:
    """Operands [rows, heads, d]; rows of two-way blocks as if they were text."""
    if plan.key_rows is not None:
        k, v = (gather_rows(x, plan.key_rows, inverse=plan.key_inverse) for x in (k, v))
    lengths = Lengths(
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        causal=True,
        window=_window(plan),
    )
    return q, k, v, lengths


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: BlockPlan, window: int | None) -> Operands:
    """The rows of two-way blocks, and their paths up to the end of each."""
    q = gather_rows(q, blocks.rows, inverse=blocks.inverse)
    k, v = (gather_rows(x, blocks.key_rows, inverse=blocks.key_inverse) for x in (k, v))
    return q, k, v, Lengths(*blocks[2:6], causal=False, window=window)


def _window(plan: AttentionPlan) -> int | None:
    return plan.window if plan.windowed else None


def _left(lengths: Lengths) -> int:
    """Keys before a query's own place that it sees; -1: all."""
    return -1 if lengths.window is None else lengths.window - 1


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None, return_lse: bool = False
) -> Any:
    """torch's own; deterministic under torch.use_deterministic_algorithms."""
    return varlen_attn(
        q,
        k,
        v,
        *lengths[:4],
        return_aux=AuxRequest(lse=True) if return_lse else None,
        scale=scale,
        window_size=(_left(lengths), 0 if lengths.causal else -1),
        **GROUPED_HEADS,
    )


def flash_attn(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None, return_lse: bool = False
) -> Any:
    """FlashAttention-2, of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    options = {"return_attn_probs": True} if return_lse else {}
    found = flash_attn_varlen_func(
        q,
        k,
        v,
        *lengths[:4],
        softmax_scale=scale,
        causal=lengths.causal,
        window_size=(_left(lengths), -1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **options,
    )
    return found[:2] if return_lse else found


def flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None, return_lse: bool = False
) -> Any:
    """FlashAttention-4, of the package flash-attn-4. Heads that it gets wrong become wider by zeros.

    Zeros of q and k change no score, those of v are cut from the output, and so is what their gradients would be.
    """
    size, wide = q.shape[-1], right_size(q.shape[-1], q.device)
    if wide > size:
        scale = size**-0.5 if scale is None else scale
        q, k, v = (torch.nn.functional.pad(x, [0, wide - size]) for x in (q, k, v))
    deterministic = torch.are_deterministic_algorithms_enabled()
    tensors = distinct_views(q, k, v, *lengths[:2])
    out, lse = _FlashAttn4.apply(*tensors, *lengths[2:], scale, deterministic)
    return (out[..., :size], lse) if return_lse else out[..., :size]


def right_size(size: int, device: torch.device) -> int:
    """The next size of a head that FlashAttention-4 gets right on the device; torch.compile takes it as a constant."""
    if size not in ROUNDED_TWO_WAYS or device.type != "cuda":
        return size
    hopper = torch.cuda.get_device_properties(device).major == 9
    return -(-size // 32) * 32 if hopper else size


KERNELS: dict[str, Kernel] = {
    "varlen": torch_varlen,
    "flash_attn": flash_attn,
    "flash_attn_4": flash_attn_4,
    "fixed_blocks": fixed_blocks,
}


class Call(NamedTuple):
    """What FlashAttention-4 gets: q [rows, heads, d], k and v [K, kv heads, d], and their `Lengths`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: Size
    max_seqlen_k: Size
    causal: bool
    window: int | None  # of `Lengths`
    scale: float | None
    deterministic: bool  # the backward

    @property
    def options(self) -> dict[str, Any]:
        """What the package's forward and backward both get, by its names."""
        names = (*Lengths._fields[:4], "causal")
        left = {} if self.window is None else {"window_size_left": self.window - 1}
        return {n: getattr(self, n) for n in names} | {"softmax_scale": self.scale} | left


# Ops of ours, because torch.compile can't trace the package's autograd.Function.
def _run(call: Call) -> tuple[Tensor, Tensor]:
    """Out [rows, heads, d], and log of the sum of exp, [heads, rows] float32."""
    forward = flash_attn_4_interface()._flash_attn_fwd
    out, lse, *_ = forward(*call[:3], return_lse=True, **call.options)
    return out, lse


def _run_backward(
    grad: Tensor, call: Call, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    backward, deterministic = flash_attn_4_interface()._flash_attn_bwd, call.deterministic
    to_q, to_k, to_v = backward(
        *call[:3], out, grad, lse, deterministic=deterministic, **call.options
    )
    return to_q, to_k, to_v


def _fake(call: Call) -> tuple[Tensor, Tensor]:
    q = call.q
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _fake_backward(
    grad: Tensor, call: Call, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)


_op = define_op("flash_attn_4", _run, _fake)
_backward_op = define_op("flash_attn_4_backward", _run_backward, _fake_backward)


class _FlashAttn4(torch.autograd.Function):
    """Out and log-sum-exp from the fields of a Call."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        out, lse = _op(*call)
        ctx.save_for_backward(*call[:5], out, lse)
        ctx.numbers = call[5:]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        found = _backward_op(grad, *tensors, *ctx.numbers, out, lse)
        return *found, *(None,) * (len(Call._fields) - 3)
