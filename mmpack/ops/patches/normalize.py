"""Rows of patches as bytes, in the tower's order already, to the values that the processor makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import define_op
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.patches import NORMALIZE_BYTES
from mmpack.ops.patches.pack import ROW_DTYPES
from mmpack.video.patches import CHANNELS

BYTES = 256


def normalize_bytes(rows: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 rows [patches, patch_dim] to `values[channel, byte]`, in one pass.

    Args:
        rows: patches in the tower's order; a row is channels, then frames, height and width.
        values: float32 [3, 256] on the rows' device: `byte_values(settings)`. A table has the bits of whatever the
            processor computes; no formula has those of all processors.
        dtype: of the result, float32, bfloat16 or float16: the value is rounded to it once.

    Raises: ArgumentError.

    Example: white and black, of one pixel per channel.
        >>> import torch
        >>> from mmpack.ops.patches.normalize import normalize_bytes
        >>> values = torch.linspace(-1, 1, 256).repeat(3, 1)
        >>> normalize_bytes(torch.tensor([[255, 0, 255]], dtype=torch.uint8), values)
        tensor([[ 1., -1.,  1.]])
    """
    check_are_tensors("normalize_bytes", rows=rows, values=values)
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] % CHANNELS:
        raise ArgumentError(
            f"normalize_bytes: rows are {rows.dtype} {list(rows.shape)}, expected uint8 [patches, patch_dim]. "
            "Fix: pass pixels of wrap_processor(…, pixels='uint8')"
        )
    if values.dtype != torch.float32 or list(values.shape) != [CHANNELS, BYTES]:
        raise ArgumentError(
            f"normalize_bytes: values are {values.dtype} {list(values.shape)}, expected float32 [{CHANNELS}, {BYTES}]. "
            "Fix: pass torch.from_numpy(byte_values(settings).copy())"
        )
    if values.device != rows.device:
        raise ArgumentError(
            f"normalize_bytes: rows are on {rows.device}, values on {values.device}. Fix: move both to one device"
        )
    if dtype not in ROW_DTYPES:
        raise ArgumentError(
            f"normalize_bytes: dtype is {dtype!r:.60}. Fix: pass torch.float32, torch.bfloat16 or torch.float16"
        )
    return normalize_op(rows.contiguous(), values.contiguous(), dtype)


def _normalize(rows: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(rows, dtype=dtype)
    if rows.numel():
        implementation(NORMALIZE_BYTES, rows.device).normalize_bytes(rows, values, out)
    return out


def _normalize_fake(rows: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(rows, dtype=dtype)


normalize_op = define_op("normalize_bytes", _normalize, _normalize_fake)
