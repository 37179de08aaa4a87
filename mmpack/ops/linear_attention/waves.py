"""The gated delta rule by flash-linear-attention: one call per wave of depth, from the last states of the wave before.

A branch's first state is its parent's last one; the gradients of branches to it are summed in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import require
from mmpack.ops.linear_attention.segment_plan import SegmentPlan
from mmpack.ops.rows.gather import gather_op, gather_rows


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: SegmentPlan,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Shapes as of `segment_delta_rule`, on a GPU. States are float32."""
    fla = require("fla.ops.gated_delta_rule", "fla", "linear attention on a GPU")
    by_wave = [
        _moved(x, plan.order, plan.place) for x in (q, k.to(q.dtype), v.to(q.dtype), g, beta)
    ]
    split = [x.split([wave.rows for wave in plan.waves]) for x in by_wave]
    out, states = [], None
    for depth, (wave, parts) in enumerate(zip(plan.waves, zip(*split, strict=True), strict=True)):
        first = None
        if states is not None and wave.parents is not None:
            first = gather_rows(states, wave.parents, inverse=wave.children)
        made, states = fla.chunk_gated_delta_rule(
            *(x[None] for x in parts),
            scale=scale,
            initial_state=first,
            output_final_state=depth + 1 < len(plan.waves),
            use_qk_l2norm_in_kernel=qk_l2norm,
            cu_seqlens=wave.cu_seqlens,
            chunk_indices=wave.chunk_indices,
        )
        out.append(made[0])
    return _moved(torch.cat(out) if len(out) > 1 else out[0], plan.place, plan.order)


def _moved(x: Tensor, index: Tensor | None, back: Tensor | None) -> Tensor:
    """x[index], of a permutation and its inverse; x where there is none."""
    if index is None or back is None:
        return x
    return _Permute.apply(x, index, back)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return gather_op(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, back = ctx.saved_tensors
        return _Permute.apply(grad, back, index), None, None
