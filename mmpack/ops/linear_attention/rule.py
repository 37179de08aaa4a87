"""The gated delta rule over the segments of a pack, with gradients through the states that branches start from."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.ops.inputs import check_floats, check_shapes, check_tensors
from mmpack.ops.linear_attention import chunks, waves
from mmpack.ops.linear_attention.choose import choose
from mmpack.ops.linear_attention.segment_plan import SegmentPlan


def segment_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: SegmentPlan,
    scale: float | None = None,
    backend: str = "auto",
    qk_l2norm: bool = True,
) -> Tensor:
    """[T, Hv, Dv], of q's dtype. A row reads and writes its path's state; a branch starts from its parent's last one.

    Args:
        q, k: [T, Hk, Dk]; v: [T, Hv, Dv], Hv a multiple of Hk; g: [T, Hv], logarithms of decays, at most 0; beta: [T,
            Hv], how much of a row is written.
        plan: of the rows' segments, on their device.
        scale: of the queries; Dk ** -0.5 if not given.
        backend: "torch" or "fla" instead of what MMPACK_LINEAR_ATTENTION or the device chooses (`choose.py`).
        qk_l2norm: queries and keys are divided by their norm first, as Qwen3.5 has it.

    States are float32 (float64 where an input is). A sample of a plain pack has the bits that it has alone, in plain
    torch on a CPU. Raises ArgumentError for shapes, devices and plans that don't fit; BackendError where what was asked
    for, or what a GPU needs, can't run.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    check_tensors("segment_delta_rule", (), **tensors)
    names = {"q": "T Hk Dk", "k": "T Hk Dk", "v": "T Hv Dv", "g": "T Hv", "beta": "T Hv"}
    fix = "pass rows without a batch dimension"
    shapes = {name: (x, names[name]) for name, x in tensors.items()}
    sizes = check_shapes("segment_delta_rule", fix, **shapes)
    check_floats("segment_delta_rule", "pass floating tensors", **tensors)
    if not sizes["Hk"] or sizes["Hv"] % sizes["Hk"]:
        raise ArgumentError(
            f"segment_delta_rule: v has {sizes['Hv']} heads and q {sizes['Hk']}, expected a multiple. "
            "Fix: pass whole groups of heads"
        )
    check_plan("segment_delta_rule", plan, q)
    if scale is not None:
        check_number("segment_delta_rule", "scale", scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    name = choose(q.device, q.dtype, q.shape[-1], gradients, backend)
    if not q.numel() or not v.numel():
        return (v * (g + beta)[..., None] + q.sum() + k.sum()).to(q.dtype)
    if name == "fla":
        return waves.delta_rule(q, k, v, g, beta, plan, scale, qk_l2norm)
    with torch.autocast(q.device.type, enabled=False):  # its products are of states, in float32
        return chunks.delta_rule(q, k, v, g, beta, plan.chunk_plan(), scale, qk_l2norm)


def check_plan(what: str, plan: SegmentPlan, x: Tensor) -> None:
    """Raise ArgumentError for what is no plan, and for a plan of other rows than x's, or elsewhere."""
    if not isinstance(plan, SegmentPlan):
        raise ArgumentError(
            f"{what}: plan is {kind_of(plan)}, expected a SegmentPlan. Fix: pass batch.segment_plan, or make one by "
            "plan_segments"
        )
    if plan.rows != x.shape[0]:
        raise ArgumentError(
            f"{what}: the plan is for {plan.rows} rows, but there are {x.shape[0]}. Fix: pass batch.segment_plan"
        )
    if plan.device != x.device:
        raise ArgumentError(
            f"{what}: the plan is on {plan.device}, but the rows are on {x.device}. Fix: pass plan.to(device)"
        )
