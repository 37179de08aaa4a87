"""Frames of clips to rows of patches in the tower's order and back, normalised on the way if asked for.

The two are each other's transpose: the gradient of one is the other. Where each clip lies: `mmpack/video/patches.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.families import Family, get_family
from mmpack.ops.backend import choose
from mmpack.ops.pack_video_torch import pack_torch, unpack_torch
from mmpack.ops.patch_tables import PatchTables, count_rows, count_values, patch_tables
from mmpack.video.patches import CHANNELS, PatchPlan, divisor, of_channels, plan_patches

FRAME_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
    """Clips to rows [rows, patch_dim] in the order of transformers' Qwen-VL video processors, clip after clip.

    Args:
        frames: one clip [n, h, w, 3] or [n, 3, h, w]; a list of them, of any sizes; or one buffer [values] of all
            clips, one after the other. Tensors or arrays, uint8 or float; float64 only where values stay as they are.
        plan: `plan_patches(…)`; `patch_tables` of it (under torch.compile); or a family, which keeps every frame.
        mean, std, rescale_factor: as image processors have them (`normalization(settings)`). With all three a value is
            (x − mean · (1/rescale)) / (std · (1/rescale)) in float32, one rounding a step, as transformers computes it;
            rescale_factor alone multiplies; mean and std alone normalise values as they are.
        dtype: of the rows; by default float32 where values change, else the frames'.

    One copy of what is read, on the frames' device. Float frames have a gradient: that of a frame which fills its
    patch by being repeated is the sum over its repeats. Raises: ArgumentError for shapes that are not the plan's.
    """
    if (mean is None) != (std is None):
        raise ArgumentError("pack_video: mean and std go together. Fix: pass both or none")
    if mean is not None:
        mean = of_channels("pack_video: mean", mean)
        std = of_channels("pack_video: std", std, divisors=True)
    if rescale_factor is not None:
        rescale_factor = divisor("pack_video: rescale_factor", rescale_factor)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"pack_video: dtype is {dtype!r:.60}. Fix: a torch.dtype")
    if not _single(frames) and not isinstance(frames, list | tuple):
        raise ArgumentError(
            f"pack_video: frames are {type(frames).__name__}. Fix: a tensor, an array, or a list of them"
        )
    clips = [_tensor(c) for c in ([frames] if _single(frames) else frames)]
    tables = _tables_of(plan, clips, "pack_video")
    _check_clips(clips, tables)
    changed = mean is not None or rescale_factor is not None
    if clips and (
        clips[0].dtype not in FRAME_DTYPES or (changed and clips[0].dtype == torch.float64)
    ):
        told = "normalised in float32" if changed else "uint8 or float"
        raise ArgumentError(
            f"pack_video: frames are {clips[0].dtype}, they are {told}. Fix: uint8 or float32 frames"
        )
    if dtype is None:
        dtype = torch.float32 if changed else clips[0].dtype if clips else torch.uint8
    if changed and not dtype.is_floating_point:
        raise ArgumentError(
            f"pack_video: normalised values don't fit {dtype}. Fix: dtype=torch.float32 or torch.bfloat16"
        )
    if not clips:
        return torch.empty(0, tables.family.patch_dim, dtype=dtype)
    rows: Tensor = _pack_video(
        [c.contiguous() for c in clips],
        *_plain(tables),
        mean,
        std,
        rescale_factor,
        dtype,
        True,
    )
    return rows


def unpack_video(rows: Tensor | np.ndarray, plan: PatchPlan | PatchTables) -> list[Tensor]:
    """Rows [rows, patch_dim] back to frames: one tensor a clip, in the shape that the plan has for it.

    The tensors are views of one buffer. Repeats that filled a temporal patch are left out; frames of temporal patches
    that the plan does not keep are 0. `unpack_video(pack_video(x, plan), plan)` is x where all are kept. Float rows
    have a gradient. Raises: ArgumentError.
    """
    values = _tensor(rows)
    tables = _tables_of(plan, [values], "unpack_video")
    if values.shape != (tables.num_rows, tables.family.patch_dim):
        raise ArgumentError(
            f"unpack_video: rows have shape {list(values.shape)}, the plan's "
            f"{[tables.num_rows, tables.family.patch_dim]}. Fix: pass the rows that the plan packs"
        )
    buffer: Tensor = _unpack_video(values.contiguous(), *_plain(tables), False)
    counts = [n * h * w * c for n, h, w, c in tables.shapes]
    return [x.view(s) for x, s in zip(buffer.split(counts), tables.shapes, strict=True)]


@torch.library.custom_op("mmpack::pack_video", mutates_args=())
def _pack_video(
    clips: Sequence[Tensor],
    starts: Tensor,
    patches: Tensor,
    blocks: Tensor,
    sizes: Sequence[int],
    kept: Sequence[int] | None,
    family: str,
    channels_last: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    rescale: float | None,
    dtype: torch.dtype,
    repeat: bool,
) -> Tensor:
    layout = get_family(family)
    out = clips[0].new_empty(count_rows(sizes, kept, layout), layout.patch_dim, dtype=dtype)
    mean, std = (None if x is None else scaled(x, rescale) for x in (mean, std))
    scale = rescale if mean is None else None
    if choose("pack_video", out.device) == "torch":
        pack_torch(clips, out, sizes, kept, layout, channels_last, mean, std, scale, repeat)
    else:
        from mmpack.kernels import pack_video as kernels

        if len(clips) > 1:
            starts = _apart(clips)
        aligned = math.gcd(4, *(c.data_ptr() for c in clips))
        order = layout, channels_last, mean, std, scale, repeat, aligned
        kernels.pack_video(clips[0], out, starts, patches, blocks, *order)
    return out


@torch.library.custom_op("mmpack::unpack_video", mutates_args=())
def _unpack_video(
    rows: Tensor,
    starts: Tensor,
    patches: Tensor,
    blocks: Tensor,
    sizes: Sequence[int],
    kept: Sequence[int] | None,
    family: str,
    channels_last: bool,
    total: bool,
) -> Tensor:
    layout = get_family(family)
    new = rows.new_zeros if kept is not None else rows.new_empty
    out = new(count_values(sizes))
    if choose("pack_video", out.device) == "torch":
        unpack_torch(rows, out, sizes, kept, layout, channels_last, total)
    else:
        from mmpack.kernels import pack_video as kernels

        order = layout, channels_last, total
        kernels.unpack_video(rows, out, starts, patches, blocks, *order)
    return out


@_pack_video.register_fake
def _(
    clips: Sequence[Tensor],
    starts: Tensor,
    patches: Tensor,
    blocks: Tensor,
    sizes: Sequence[int],
    kept: Sequence[int] | None,
    family: str,
    channels_last: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    rescale: float | None,
    dtype: torch.dtype,
    repeat: bool,
) -> Tensor:
    layout = get_family(family)
    return clips[0].new_empty(count_rows(sizes, kept, layout), layout.patch_dim, dtype=dtype)


@_unpack_video.register_fake
def _(
    rows: Tensor,
    starts: Tensor,
    patches: Tensor,
    blocks: Tensor,
    sizes: Sequence[int],
    kept: Sequence[int] | None,
    family: str,
    channels_last: bool,
    total: bool,
) -> Tensor:
    return rows.new_empty(count_values(sizes))


def _keep_for_pack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    clips, starts, patches, blocks, *plain, _mean, std, rescale, _dtype, repeat = inputs
    ctx.save_for_backward(starts, patches, blocks)
    ctx.plain, ctx.repeat = plain, repeat
    ctx.factors = std, rescale
    ctx.clips = [(c.shape, c.dtype) for c in clips]


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    std, rescale = ctx.factors
    dtype = ctx.clips[0][1]
    if std is not None:
        of_channel = grad.new_tensor(scaled(std, rescale), dtype=torch.float32)
        grad = (grad.float().view(len(grad), CHANNELS, -1) / of_channel[:, None]).view_as(grad)
    elif rescale is not None:
        grad = grad.float() * rescale
    buffer = _unpack_video(grad.to(dtype).contiguous(), *ctx.saved_tensors, *ctx.plain, ctx.repeat)
    pieces = buffer.split([shape.numel() for shape, _ in ctx.clips])
    of_clips = [x.view(shape) for x, (shape, _) in zip(pieces, ctx.clips, strict=True)]
    return of_clips, *[None] * 12


def _keep_for_unpack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, starts, patches, blocks, *plain, total = inputs
    ctx.save_for_backward(starts, patches, blocks)
    ctx.plain, ctx.total, ctx.dtype = plain, total, rows.dtype


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows = _pack_video(
        [grad.contiguous()], *ctx.saved_tensors, *ctx.plain, None, None, None, ctx.dtype, ctx.total
    )
    return rows, *[None] * 8


torch.library.register_autograd("mmpack::pack_video", _pack_backward, setup_context=_keep_for_pack)
torch.library.register_autograd(
    "mmpack::unpack_video", _unpack_backward, setup_context=_keep_for_unpack
)


def scaled(values: Sequence[float], rescale: float | None) -> list[float]:
    """mean or std in the units of the frames, rounded as transformers' processors round: float32 times 1/rescale."""
    factor = np.float32(1.0 if rescale is None else 1.0 / rescale)
    return [float(np.float32(v) * factor) for v in values]


def _tables_of(
    plan: PatchPlan | PatchTables | Family | str, tensors: list[Tensor], what: str
) -> PatchTables:
    if isinstance(plan, PatchTables):
        return plan
    if not isinstance(plan, PatchPlan):
        plan = plan_patches([c.shape for c in tensors], plan)
    return patch_tables(plan, tensors[0].device if tensors else "cpu")


def _plain(tables: PatchTables) -> tuple[Any, ...]:
    """The arguments of both ops that tell the layout."""
    return (
        tables.starts,
        tables.patches,
        tables.blocks,
        tables.sizes,
        tables.kept,
        tables.family.name,
        tables.channels_last,
    )


def _check_clips(clips: list[Tensor], tables: PatchTables) -> None:
    shapes = tables.shapes
    if len(clips) == 1 and clips[0].ndim == 1:
        if len(clips[0]) != count_values(tables.sizes):
            raise ArgumentError(
                f"pack_video: the buffer holds {len(clips[0])} values, the plan's clips "
                f"{count_values(tables.sizes)}. Fix: all clips of the plan, one after the other"
            )
    else:
        found = [tuple(c.shape) for c in clips]
        if found != shapes:
            at = next((i for i, s in enumerate(found) if i >= len(shapes) or s != shapes[i]), -1)
            told = f"{len(found)} clips for {len(shapes)}"
            if at >= 0 and at < len(shapes):
                told = f"clip {at} of shape {list(found[at])}, the plan's is {list(shapes[at])}"
            raise ArgumentError(f"pack_video: {told}. Fix: pass the clips that were planned")
    kinds = {(c.dtype, c.device) for c in clips}
    if len(kinds) > 1:
        raise ArgumentError(
            f"pack_video: clips of {len(kinds)} dtypes or devices. Fix: one dtype on one device"
        )
    if clips and clips[0].device != tables.starts.device:
        raise ArgumentError(
            f"pack_video: frames are on {clips[0].device}, the tables on {tables.starts.device}. "
            "Fix: patch_tables(plan, frames.device)"
        )


def _apart(clips: Sequence[Tensor]) -> Tensor:
    """[C] int64: where clips of their own memory start, counted in values from the first one's start."""
    first, size = clips[0].data_ptr(), clips[0].element_size()
    starts = torch.tensor([(c.data_ptr() - first) // size for c in clips])
    device = clips[0].device
    if device.type == "cpu":
        return starts
    return starts.pin_memory().to(device, non_blocking=True)


def _single(frames: Clips) -> bool:
    return isinstance(frames, Tensor | np.ndarray)


def _tensor(values: Any) -> Tensor:
    """A tensor of an array or a tensor, without a copy where torch allows it."""
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, np.ndarray):
        raise ArgumentError(
            f"pack_video: a clip is {type(values).__name__}. Fix: a tensor or an array [n, h, w, 3]"
        )
    array = np.ascontiguousarray(values)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
