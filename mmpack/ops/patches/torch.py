"""Frames to rows of patches and back in plain PyTorch: views, and one copy for each run of temporal patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmpack.ops.patches.call import Change, PatchLayout
from mmpack.ops.patches.tables import clips_of
from mmpack.video.patches import CHANNELS, row_view, token_view

PIECE = 1 << 14  # rows whose indices are held at once


def pack_video(clips: Sequence[Tensor], out: Tensor, layout: PatchLayout, change: Change) -> None:
    """Rows of clips (or of one buffer of all) into `out`, a run of temporal patches after the other."""
    of_rows, of_frames = _runs(clips, out, layout)
    kind, mean, std, scale = change.factors
    if kind == "normalise":
        centre, spread = (torch.tensor(x).view(-1, 1, 1, 1).to(out.device) for x in (mean, std))
    for rows, frames in zip(of_rows, of_frames, strict=True):
        slots = frames.shape[6]
        changed = frames
        if kind == "normalise":
            changed = frames.to(torch.float32, copy=True).sub_(centre).div_(spread)
        elif kind == "rescale":
            changed = frames.to(torch.float32) * scale
        rows[..., :slots, :, :].copy_(changed)
        if slots < rows.shape[6]:
            rows[..., slots:, :, :] = changed[..., -1:, :, :] if change.repeat else 0


def unpack_video(rows: Tensor, out: Tensor, layout: PatchLayout, total: bool) -> None:
    """The frames of `rows` into the buffer `out`. `total`: with repeats added, from the last one to the first."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    of_rows, of_frames = _runs([out], rows, layout)
    for values, frames in zip(of_rows, of_frames, strict=True):
        slots = frames.shape[6]
        frames.copy_(values[..., :slots, :, :])
        if total and slots < values.shape[6]:
            last = values[..., slots - 1 :, :, :].to(wide)
            summed = last[..., -1, :, :]
            for k in range(last.shape[6] - 2, -1, -1):
                summed = summed + last[..., k, :, :]
            frames[..., -1, :, :] = summed.to(rows.dtype)


def normalize_bytes(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """`values` [3, 256] of the bytes `rows` into `out`, some rows at a time: an index has four bytes a pixel."""
    pieces = zip(rows.split(PIECE), out.split(PIECE), strict=True)
    for piece, made in pieces:
        index = piece.view(len(piece), CHANNELS, -1).int()
        for channel in range(CHANNELS):
            flat = values[channel].index_select(0, index[:, channel].reshape(-1))
            made.view(index.shape)[:, channel] = flat.view(len(piece), -1)


def _runs(
    clips: Sequence[Tensor], rows: Tensor, layout: PatchLayout
) -> tuple[list[Tensor], list[Tensor]]:
    """Views of rows and of frames, in the axes of `token_view`: runs of whole temporal patches, and each last one."""
    of_rows, of_frames = [], []
    family = layout.geometry
    temporal, patch = family.temporal_patch_size, family.patch_size
    first = start = 0
    for clip, (n, h, w, numbers) in enumerate(clips_of(layout.sizes, layout.kept, temporal)):
        values = n * h * w * CHANNELS
        flat = clips[clip].view(-1) if len(clips) > 1 else clips[0].view(-1)[start : start + values]
        start += values
        frames = flat.view((n, h, w, CHANNELS) if layout.channels_last else (n, CHANNELS, h, w))
        for a, b in _consecutive(numbers, n // temporal):
            stop = min(b * temporal, n)
            slots = min(temporal, stop - a * temporal)
            of_frames.append(token_view(frames[a * temporal : stop], family, slots))
            grid = (b - a, h // patch, w // patch)
            count = grid[0] * grid[1] * grid[2]
            of_rows.append(row_view(rows[first : first + count], grid, family))
            first += count
    return of_rows, of_frames


def _consecutive(numbers: Sequence[int], whole: int) -> Iterator[tuple[int, int]]:
    """[first, stop) of runs of temporal patches; one that frames don't fill (number `whole`) is a run of its own."""
    first = stop = None
    for k in numbers:
        if k != stop or k == whole:
            if first is not None and stop is not None:
                yield first, stop
            first = k
        stop = k + 1
    if first is not None and stop is not None:
        yield first, stop
