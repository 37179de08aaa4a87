"""Bytes of frames to rows of patches and back, by csrc/pack_video.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from mmpack.families import Family
from mmpack.ops.csrc import native_ops
from mmpack.ops.patches.division import divides_bytes
from mmpack.video.patches import CHANNELS, merge_of

# The numbers of csrc/ops.h.
CHANGES = {"convert": 0, "normalise": 1, "normalise_bytes": 2, "rescale": 3}


def pack_video(
    frames: Tensor,
    out: Tensor,
    shifts: Tensor | None,
    patches: Tensor,
    blocks: Tensor,
    family: Family,
    channels_last: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    scale: float | None,
    repeat: bool,
    aligned: int,
) -> None:
    """Fill `out` [rows, patch_dim] from `frames`, one buffer or the first clip. Tables: `PatchTables`.

    `shifts` [C] int64: values that each clip is further from the first than in one buffer; None for a buffer.
    `aligned`: bytes of which the addresses of all clips are multiples. Bytes have no gradient: `repeat` is True.
    """
    if out.numel() == 0:
        return
    change = "normalise" if mean is not None else "convert" if scale is None else "rescale"
    mean, std = tuple(mean or (0.0,) * 3), tuple(std or (1.0,) * 3)
    if change == "normalise" and divides_bytes(mean, std):
        change = "normalise_bytes"
    native_ops().pack_video.default(
        frames,
        out,
        shifts,
        patches,
        blocks,
        *_geometry(family, channels_last),
        CHANGES[change],
        *mean,
        *std,
        1.0 if scale is None else scale,
        _words(family, channels_last, aligned),
    )


def unpack_video(
    rows: Tensor,
    out: Tensor,
    patches: Tensor,
    blocks: Tensor,
    family: Family,
    channels_last: bool,
    total: bool,
) -> None:
    """Fill the buffer `out` [values] from `rows`. Bytes have no gradient: `total` is False."""
    if rows.numel() == 0:
        return
    geometry = _geometry(family, channels_last)
    token = family.patch_dim * merge_of(family) ** 2
    words = math.gcd(16, rows.data_ptr(), token), _words(family, channels_last, out.data_ptr())
    native_ops().unpack_video.default(rows, out, patches, blocks, *geometry, *words)


def _geometry(family: Family, channels_last: bool) -> tuple[int, int, int, bool]:
    return family.patch_size, merge_of(family), family.temporal_patch_size, channels_last


def _words(family: Family, channels_last: bool, aligned: int) -> int:
    """Bytes of the words in which a token's lines are read or written."""
    line = family.patch_size * merge_of(family) * (CHANNELS if channels_last else 1)
    return math.gcd(4, aligned, line)
