"""Frames of clips to rows of patches in the tower's order and back, normalised on the way if asked for.

The two are each other's transpose: the gradient of one is the other. Where each clip lies: `mmpack/video/patches.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.families import Family
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import define_op, distinct_views, refuse_transforms
from mmpack.ops.patches import PACK_VIDEO, UNPACK_VIDEO
from mmpack.ops.patches.call import Change, PatchLayout, scaled
from mmpack.ops.patches.lines import channels_first, channels_last
from mmpack.ops.patches.tables import PatchTables, patch_tables
from mmpack.video.patches import CHANNELS, PatchPlan, plan_patches
from mmpack.video.pixel_settings import divisor, of_channels

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of values that change
FRAME_DTYPES = (torch.uint8, *ROW_DTYPES, torch.float64)
Clips = Tensor | np.ndarray | Sequence[Any]


def pack_video(
    frames: Clips,
    plan: PatchPlan | PatchTables | Family | str,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    rescale_factor: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Clips to rows [rows, patch_dim] in the order of transformers' video processors of the family, clip after clip.

    Args:
        frames: one clip [n, h, w, 3] or [n, 3, h, w]; a list of them, of any sizes; or one buffer [values] of all
            clips, one after the other. Tensors or arrays, uint8 or float; float64 only where values stay as they are.
        plan: `plan_patches(…)`; `patch_tables` of it (under torch.compile); or a family, which keeps every frame.
        mean, std, rescale_factor: as image processors have them (`normalization(settings)`). With all three a value is
            (x − mean · (1/rescale)) / (std · (1/rescale)) in float32, rounded at each step, as transformers computes
            it. Only rescale_factor: values are multiplied. Only mean and std: values are normalised as they are.
        dtype: of the rows, float32, bfloat16 or float16; by default float32 where values change, else the frames'.

    One copy of what is read, on the frames' device. Float frames have a gradient: that of a frame which fills its
    patch by being repeated is the sum over its repeats. Raises: ArgumentError for shapes that are not the plan's.

    Example: two white frames of 56 × 28 are one temporal patch of 4 × 2 patches of 14.
        >>> import numpy as np
        >>> import mmpack as mp
        >>> frames = np.full((2, 56, 28, 3), 255, dtype=np.uint8)
        >>> rows = mp.ops.pack_video(frames, "qwen2_vl", rescale_factor=1 / 255)
        >>> rows.shape, float(rows.max())
        (torch.Size([8, 1176]), 1.0)
    """
    if (mean is None) != (std is None):
        raise ArgumentError(
            "pack_video: mean and std must be passed together. Fix: pass both or neither"
        )
    if mean is not None:
        mean = of_channels("pack_video: mean", mean)
        std = of_channels("pack_video: std", std, divisors=True)
    if rescale_factor is not None:
        rescale_factor = divisor("pack_video: rescale_factor", rescale_factor)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"pack_video: dtype is {dtype!r:.60}. Fix: pass a torch.dtype")
    if not _single(frames) and not isinstance(frames, list | tuple):
        raise ArgumentError(
            f"pack_video: frames are {type(frames).__name__}. Fix: pass a tensor, an array, or a list of them"
        )
    clips = [_tensor(c) for c in ([frames] if _single(frames) else frames)]
    tables = _tables_of(plan, clips)
    _check_clips(clips, tables)
    changed = mean is not None or rescale_factor is not None
    dtype = _row_dtype(clips[0].dtype if clips else torch.uint8, changed, dtype)
    if not clips:
        return tables.layout.patches.new_empty(0, tables.layout.geometry.patch_dim, dtype=dtype)
    change = Change(mean, std, rescale_factor, dtype, True)
    refuse_transforms("pack_video", *clips)
    clips = [c.contiguous() for c in clips]
    if torch.is_grad_enabled() and any(c.requires_grad for c in clips):
        rows: Tensor = _Pack.apply(*tables.layout, change, *distinct_views(*clips))
    else:
        rows = pack_op(clips, *tables.layout, *change)
    return channels_last(rows, tables.layout.geometry)


def unpack_video(rows: Tensor | np.ndarray, plan: PatchPlan | PatchTables) -> list[Tensor]:
    """Rows [rows, patch_dim] of any dtype back to frames: one tensor per clip, [n, h, w, 3] or [n, 3, h, w] as planned.

    The tensors are views of one buffer. Repeats that filled a temporal patch are left out; frames of temporal patches
    that the plan does not keep are 0. `unpack_video(pack_video(x, plan), plan)` is x where all are kept. Float rows
    have a gradient. Raises: ArgumentError.
    """
    values = _tensor(rows)
    tables = _tables_of(plan, [values])
    if values.shape != (tables.layout.num_rows, tables.layout.geometry.patch_dim):
        raise ArgumentError(
            f"unpack_video: rows have shape {list(values.shape)}, the plan's "
            f"{[tables.layout.num_rows, tables.layout.geometry.patch_dim]}. Fix: pass the rows that the plan packs"
        )
    refuse_transforms("unpack_video", values)
    values = channels_first(values, tables.layout.geometry)
    if torch.is_grad_enabled() and values.requires_grad:
        buffer = _Unpack.apply(values, *tables.layout, False)
    else:
        buffer = unpack_op(values, *tables.layout, False)
    pieces = buffer.split(tables.counts)
    return [x.view(s) for x, s in zip(pieces, tables.shapes, strict=True)]


def _pack(clips: list[Tensor], layout: PatchLayout, change: Change) -> Tensor:
    first = clips[0]
    out = first.new_empty(layout.num_rows, layout.geometry.patch_dim, dtype=change.dtype)
    module = implementation(PACK_VIDEO, out.device, first.dtype)
    module.pack_video(clips, out, layout, change)
    return out


def _pack_fake(clips: list[Tensor], layout: PatchLayout, change: Change) -> Tensor:
    return clips[0].new_empty(layout.num_rows, layout.geometry.patch_dim, dtype=change.dtype)


def _unpack(rows: Tensor, layout: PatchLayout, total: bool) -> Tensor:
    rows = rows.contiguous()
    new = rows.new_zeros if layout.kept is not None else rows.new_empty
    out = new(layout.num_values)
    module = implementation(UNPACK_VIDEO, out.device, rows.dtype)
    module.unpack_video(rows, out, layout, total)
    return out


def _unpack_fake(rows: Tensor, layout: PatchLayout, total: bool) -> Tensor:
    return rows.new_empty(layout.num_values)


pack_op = define_op("pack_video", _pack, _pack_fake)
unpack_op = define_op("unpack_video", _unpack, _unpack_fake)


class _Pack(torch.autograd.Function):
    """Rows from a PatchLayout, field by field, a Change, and clips; its transpose is _Unpack."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        count = len(PatchLayout._fields)
        layout, change, clips = arguments[:count], arguments[count], arguments[count + 1 :]
        ctx.save_for_backward(*layout[:2])
        ctx.rest, ctx.change = layout[2:], change
        ctx.shapes, ctx.dtype = [c.shape for c in clips], clips[0].dtype
        return pack_op(list(clips), *layout, *change)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        change: Change = ctx.change
        if change.std is not None:
            std = grad.new_tensor(scaled(change.std, change.rescale), dtype=torch.float32)
            grad = (grad.float().view(len(grad), CHANNELS, -1) / std[:, None]).view_as(grad)
        elif change.rescale is not None:
            grad = grad.float() * change.rescale
        layout = *ctx.saved_tensors, *ctx.rest
        buffer = _Unpack.apply(grad.to(ctx.dtype), *layout, change.repeat)
        pieces = buffer.split([shape.numel() for shape in ctx.shapes])
        to_clips = (x.view(shape) for x, shape in zip(pieces, ctx.shapes, strict=True))
        return *[None] * (len(layout) + 1), *to_clips


class _Unpack(torch.autograd.Function):
    """One buffer from rows, a PatchLayout, field by field, and `total`; its transpose is _Pack."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *arguments: Any) -> Tensor:
        *layout, total = arguments
        ctx.save_for_backward(*layout[:2])
        ctx.rest, ctx.total, ctx.dtype = layout[2:], total, rows.dtype
        return unpack_op(rows, *layout, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        change = Change(None, None, None, ctx.dtype, ctx.total)
        layout = *ctx.saved_tensors, *ctx.rest
        rows = _Pack.apply(*layout, change, grad.contiguous())
        return rows, *[None] * (len(layout) + 1)


def _tables_of(plan: PatchPlan | PatchTables | Family | str, tensors: list[Tensor]) -> PatchTables:
    if isinstance(plan, PatchTables):
        return plan
    if not isinstance(plan, PatchPlan):
        plan = plan_patches([c.shape for c in tensors], plan)
    return patch_tables(plan, tensors[0].device if tensors else "cpu")


def _row_dtype(found: torch.dtype, changed: bool, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of rows from frames of dtype `found`, whose values are `changed` or not."""
    if found not in FRAME_DTYPES or (changed and found == torch.float64):
        expected = "normalised in float32" if changed else "uint8 or float"
        raise ArgumentError(
            f"pack_video: frames are {found}, they are {expected}. Fix: pass uint8 or float32 frames"
        )
    if dtype is None:
        return torch.float32 if changed else found
    if (changed or dtype != found) and (dtype not in ROW_DTYPES or found == torch.float64):
        values = "normalised values" if changed else f"values of {found}"
        fix = "pass dtype=torch.float32, torch.bfloat16 or torch.float16"
        fix = "pass frames of float32" if found == torch.float64 else fix
        raise ArgumentError(f"pack_video: {values} can't become {dtype}. Fix: {fix}")
    return dtype


def _check_clips(clips: list[Tensor], tables: PatchTables) -> None:
    shapes = tables.shapes
    if len(clips) == 1 and clips[0].ndim == 1:
        values = tables.layout.num_values
        if len(clips[0]) != values:
            raise ArgumentError(
                f"pack_video: the buffer holds {len(clips[0])} values, but the plan's clips have {values}. "
                "Fix: pass all clips of the plan, one after the other"
            )
    else:
        found = tuple(tuple(c.shape) for c in clips)
        if found != shapes:
            at = next((i for i, s in enumerate(found) if i >= len(shapes) or s != shapes[i]), -1)
            problem = f"{len(found)} clips for {len(shapes)}"
            if at >= 0 and at < len(shapes):
                problem = f"clip {at} of shape {list(found[at])}, the plan's is {list(shapes[at])}"
            raise ArgumentError(f"pack_video: {problem}. Fix: pass the clips that were planned")
    kinds = {(c.dtype, c.device) for c in clips}
    if len(kinds) > 1:
        raise ArgumentError(
            f"pack_video: the clips have {len(kinds)} dtypes or devices. Fix: pass one dtype on one device"
        )
    if clips and clips[0].device != tables.layout.patches.device:
        raise ArgumentError(
            f"pack_video: frames are on {clips[0].device}, but the tables on {tables.layout.patches.device}. "
            "Fix: pass patch_tables(plan, frames.device)"
        )


def _single(frames: Clips) -> bool:
    return isinstance(frames, Tensor | np.ndarray)


def _tensor(values: Any) -> Tensor:
    """A tensor of an array or a tensor, without a copy where torch allows it."""
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, np.ndarray):
        raise ArgumentError(
            f"pack_video: a clip is {type(values).__name__}. Fix: pass a tensor or an array [n, h, w, 3]"
        )
    array = np.ascontiguousarray(values)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
