"""A PatchPlan as the ops take it: tensors on one device and plain numbers, which a compiled graph can hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmpack.families import Family
from mmpack.video.patches import CHANNELS, PatchPlan, merge_of


@dataclass(frozen=True, eq=False)
class PatchTables:
    """A PatchPlan for the ops: tensors on one device, and what the host has to know as plain numbers.

    `patches` [T, 4 + slots]: first row, h, w in patches, clip; then where each slot's frame starts in its clip.
    """

    family: Family
    channels_last: bool
    sizes: tuple[int, ...]  # 3 a clip: frames, height, width
    # temporal patches that are rows, each clip's ended by -1; None: all are
    kept: tuple[int, ...] | None
    num_rows: int
    starts: Tensor  # [C] int64 values before each clip, in one buffer
    patches: Tensor  # [T, 4 + slots] int64
    blocks: Tensor  # [tokens, 4] int32: temporal patch, first of its rows there, first pixel (y, x)

    @property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """Frame-major shape of each clip."""
        sizes = zip(self.sizes[::3], self.sizes[1::3], self.sizes[2::3], strict=True)
        if self.channels_last:
            return [(n, h, w, CHANNELS) for n, h, w in sizes]
        return [(n, CHANNELS, h, w) for n, h, w in sizes]


_TABLES: weakref.WeakKeyDictionary[PatchPlan, dict[torch.device, PatchTables]] = (
    weakref.WeakKeyDictionary()
)


def patch_tables(plan: PatchPlan, device: torch.device | str = "cpu") -> PatchTables:
    """The plan on `device`; made once for each. What is compiled or captured takes these in place of the plan."""
    device = torch.empty(0, device=device).device  # with its number
    known = _TABLES.setdefault(plan, {})
    if device not in known:
        known[device] = _tables(plan, device)
    return known[device]


def clips_of(
    sizes: Sequence[int], kept: Sequence[int] | None, temporal: int
) -> Iterator[tuple[int, int, int, Sequence[int]]]:
    """Frames, height, width and kept temporal patches of each clip."""
    numbers = iter(kept or ())
    for n, h, w in zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True):
        if kept is not None:
            yield n, h, w, list(iter(lambda: next(numbers), -1))
        else:
            yield n, h, w, range(-(-n // temporal))


def count_rows(sizes: Sequence[int], kept: Sequence[int] | None, family: Family) -> int:
    cell = family.patch_size**2
    clips = clips_of(sizes, kept, family.temporal_patch_size)
    return sum(len(numbers) * (h * w // cell) for _, h, w, numbers in clips)


def count_values(sizes: Sequence[int]) -> int:
    values = zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True)
    return sum(n * h * w * CHANNELS for n, h, w in values)


def _tables(plan: PatchPlan, device: torch.device) -> PatchTables:
    frame = plan.sizes[:, 1] * plan.sizes[:, 2] * CHANNELS
    clip = plan.clip_index
    plane = plan.grids[clip][:, 1:]
    slots = plan.frame_index * frame[clip][:, None]
    entries = np.column_stack([plan.cu_rows[:-1], plane, clip, slots])
    merge = merge_of(plan.family)
    count = np.diff(plan.cu_rows) // merge**2
    number = np.repeat(np.arange(len(count)), count)
    token = np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)
    across = plane[number, 1] // merge
    unit = plan.family.patch_size * merge
    blocks = [number, token * merge**2, token // across * unit, token % across * unit]
    whole = -(-plan.sizes[:, 0] // plan.family.temporal_patch_size)
    kept = None
    if (whole != plan.grids[:, 0]).any():
        pieces = np.split(plan.kept, plan.cu_temporal[1:-1])
        kept = tuple(k for piece in pieces for k in (*piece.tolist(), -1))
    return PatchTables(
        family=plan.family,
        channels_last=plan.channels_last,
        sizes=tuple(plan.sizes.reshape(-1).tolist()),
        kept=kept,
        num_rows=plan.num_rows,
        starts=torch.from_numpy(plan.value_offsets[:-1]).to(device),
        patches=torch.from_numpy(entries).to(device),
        blocks=torch.from_numpy(np.column_stack(blocks).astype(np.int32)).to(device),
    )
