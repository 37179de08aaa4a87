"""Bytes of frames to rows of patches and back, by csrc/pack_video.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from mmpack.ops.native import native_ops
from mmpack.ops.patches.call import Change, PatchLayout, find_clips
from mmpack.ops.patches.division import divides_bytes
from mmpack.video.patches import CHANNELS, merge_of

# The numbers of csrc/ops.h.
CHANGES = {"copy": 0, "normalise": 1, "normalise_bytes": 2, "rescale": 3}


def pack_video(clips: Sequence[Tensor], out: Tensor, layout: PatchLayout, change: Change) -> None:
    """Fill `out` [rows, patch_dim] from clips, or from one buffer of all. Bytes have no gradient: `repeat` is True."""
    if out.numel() == 0:
        return
    shifts, aligned = find_clips(clips, layout.sizes)
    kind, mean, std, scale = change.factors
    if kind == "normalise" and divides_bytes(mean, std):
        kind = "normalise_bytes"
    native_ops().pack_video.default(
        clips[0],
        out,
        shifts,
        layout.patches,
        layout.blocks,
        *_geometry(layout),
        CHANGES[kind],
        *mean,
        *std,
        scale,
        _word_bytes(layout, aligned),
    )


def unpack_video(rows: Tensor, out: Tensor, layout: PatchLayout, total: bool) -> None:
    """Fill the buffer `out` [values] from `rows`. Bytes have no gradient: `total` is False."""
    if rows.numel() == 0:
        return
    token = layout.geometry.patch_dim * merge_of(layout.geometry) ** 2
    native_ops().unpack_video.default(
        rows,
        out,
        layout.patches,
        layout.blocks,
        *_geometry(layout),
        math.gcd(16, rows.data_ptr(), token),
        _word_bytes(layout, out.data_ptr()),
    )


def _geometry(layout: PatchLayout) -> tuple[int, int, int, bool]:
    family = layout.geometry
    return family.patch_size, merge_of(family), family.temporal_patch_size, layout.channels_last


def _word_bytes(layout: PatchLayout, aligned: int) -> int:
    """Bytes of the words in which a token's lines are read or written."""
    family = layout.geometry
    line = family.patch_size * merge_of(family) * (CHANNELS if layout.channels_last else 1)
    return math.gcd(4, aligned, line)
