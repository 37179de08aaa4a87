"""A PatchPlan as the ops take it: tensors on one device and plain numbers, which a compiled graph can hold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmpack.ops.patches.call import PatchLayout
from mmpack.video.patches import CHANNELS, PatchPlan, merge_of


@dataclass(frozen=True, eq=False)
class PatchTables:
    """A PatchPlan for the ops: where values lie, as the ops take it, and what else the host has to know."""

    layout: PatchLayout
    shapes: tuple[tuple[int, int, int, int], ...]  # of each clip, frame-major
    counts: tuple[int, ...]  # values of each clip

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows


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


def _tables(plan: PatchPlan, device: torch.device) -> PatchTables:
    frame = plan.sizes[:, 1] * plan.sizes[:, 2] * CHANNELS
    clip = plan.clip_index
    plane = plan.grids[clip][:, 1:]
    slots = plan.value_offsets[clip][:, None] + plan.frame_index * frame[clip][:, None]
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
    order = [0, 1, 2, 3] if plan.channels_last else [0, 3, 1, 2]
    channels = np.full(len(plan.sizes), CHANNELS)
    shapes = np.column_stack([plan.sizes, channels])[:, order].tolist()
    layout = PatchLayout(
        patches=torch.from_numpy(entries).to(device),
        blocks=torch.from_numpy(np.column_stack(blocks).astype(np.int32)).to(device),
        sizes=tuple(plan.sizes.reshape(-1).tolist()),
        kept=kept,
        num_rows=plan.num_rows,
        num_values=int(plan.value_offsets[-1]),
        family=plan.family.name,
        channels_last=plan.channels_last,
    )
    return PatchTables(layout, tuple(map(tuple, shapes)), tuple(map(math.prod, shapes)))
