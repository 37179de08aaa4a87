"""Clips in the order of their frames, and in the order in which a vision tower reads their patches. numpy only.

Frame-major: [n, h, w, 3] or [n, 3, h, w] per clip. Token-major: rows [t·h·w, patch_dim] (h, w in patches), by temporal
patch. A row is one patch: channels, frames, height, width. Patches of a merged token lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import Family, get_family
from mmpack.video.values import read_numbers

CHANNELS = 3

Array = TypeVar("Array")  # of numpy or torch


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """Where the values of C clips lie, in both orders; T temporal patches in all. Arrays are int64 unless said."""

    family: Family
    channels_last: bool
    sizes: np.ndarray  # [C, 3] frames, height, width (pixels), as they are handed in
    grids: np.ndarray  # [C, 3] patches t, h, w; t counts what is kept
    kept: np.ndarray  # [T] number of the temporal patch in its clip
    # [T, temporal_patch_size] frame of the clip; the last one fills the last patch
    frame_index: np.ndarray
    cu_temporal: np.ndarray  # [C+1] temporal patches before each clip
    cu_rows: np.ndarray  # [T+1] rows before each temporal patch

    @property
    def num_rows(self) -> int:
        return int(self.cu_rows[-1])

    @property
    def row_offsets(self) -> np.ndarray:
        """int64 [C+1]: rows before each clip."""
        return self.cu_rows[self.cu_temporal]

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int32 [T+1]: what a tower attends within, one temporal patch each."""
        return self.cu_rows.astype(np.int32)

    @property
    def frame_mask(self) -> np.ndarray:
        """bool [T, temporal_patch_size]: False where a frame only repeats the one before to fill its patch."""
        return np.diff(self.frame_index, axis=1, prepend=-1) != 0

    @property
    def clip_index(self) -> np.ndarray:
        """int64 [T]: the clip of each temporal patch."""
        return np.repeat(np.arange(len(self.grids)), self.grids[:, 0])

    @property
    def value_offsets(self) -> np.ndarray:
        """int64 [C+1]: values before each clip, where clips lie one after the other in one buffer."""
        return np.concatenate([[0], np.cumsum(self.sizes.prod(axis=1) * CHANNELS)])

    def shape(self, clip: int) -> tuple[int, int, int, int]:
        """Frame-major shape of a clip."""
        n, h, w = (int(size) for size in self.sizes[clip])
        return (n, h, w, CHANNELS) if self.channels_last else (n, CHANNELS, h, w)

    def gather_index(self, clip: int) -> np.ndarray:
        """int64 [rows, patch_dim]: `frames.reshape(-1)[index]` are the clip's rows."""
        numbers = np.arange(np.prod(self.shape(clip))).reshape(self.shape(clip))
        mine = self.frame_index[self.cu_temporal[clip] : self.cu_temporal[clip + 1]]
        return token_view(numbers[mine.reshape(-1)], self.family).reshape(-1, self.family.patch_dim)

    def scatter_index(self, clip: int) -> np.ndarray:
        """int64 [n, …] as `shape`: `rows.reshape(-1)[index]` are the clip's frames; -1 where no row holds one."""
        index = self.gather_index(clip).reshape(-1)
        out = np.full(np.prod(self.shape(clip)), -1, dtype=np.int64)
        out[index[::-1]] = np.arange(len(index))[::-1]  # of repeats the first stays
        return out.reshape(self.shape(clip))


def plan_patches(
    shapes: Sequence[Sequence[int]],
    family: str | Family,
    *,
    keep: Sequence[Sequence[int] | None] | None = None,
) -> PatchPlan:
    """The plan of clips of these frame-major shapes, [n, h, w, 3] all or [n, 3, h, w] all; h, w after the resize.

    Args:
        family: name or Family, for its patch, temporal patch and merge sizes.
        keep: of each clip the temporal patches that become rows, ascending; None: all of them.

    An image is a clip of one frame. A clip whose frames don't fill its last temporal patch repeats the last one.

    Example: three frames of 56 × 28 pixels; the fourth repeats the third, and is masked.
        >>> from mmpack.video import plan_patches
        >>> plan = plan_patches([(3, 28, 56, 3)], "qwen2_5_vl")
        >>> plan.grids.tolist(), plan.num_rows, plan.cu_seqlens.tolist()
        ([[2, 2, 4]], 16, [0, 8, 16])
        >>> plan.frame_index.tolist(), plan.frame_mask.tolist()
        ([[0, 1], [2, 2]], [[True, True], [True, False]])

    Raises: ArgumentError for a shape that is no clip's, or that patches don't divide.
    """
    if get_family(family) != get_family(get_family(family).name):
        raise ArgumentError(
            "plan_patches: the family is not a registered one. Fix: pass one of mmpack.families, or its name"
        )
    family = get_family(family)
    unit = family.patch_size * family.spatial_merge_size
    keep = [None] * len(shapes) if keep is None else keep
    if len(keep) != len(shapes):
        raise ArgumentError(
            f"plan_patches: keep has {len(keep)} entries for {len(shapes)} clips. Fix: pass one entry per clip, or None"
        )
    shapes = [
        read_numbers(f"plan_patches: shape of clip {i}", s, "pass decoded RGB frames").tolist()
        for i, s in enumerate(shapes)
    ]
    last = _channels_last(shapes)
    checked = [_size(s, last, unit, i) for i, s in enumerate(shapes)]
    sizes = np.array(checked, dtype=np.int64).reshape(-1, 3)
    patches = -(-sizes[:, 0] // family.temporal_patch_size)
    kept = [_kept(k, int(t), i) for i, (k, t) in enumerate(zip(keep, patches, strict=True))]
    grids = sizes // np.array([1, family.patch_size, family.patch_size], dtype=np.int64)
    grids[:, 0] = [len(k) for k in kept]
    numbers = np.concatenate([np.zeros(0, np.int64), *kept])
    slots = numbers[:, None] * family.temporal_patch_size + np.arange(family.temporal_patch_size)
    return PatchPlan(
        family=family,
        channels_last=last,
        sizes=sizes,
        grids=grids,
        kept=numbers,
        frame_index=np.minimum(slots, np.repeat(sizes[:, 0] - 1, grids[:, 0])[:, None]),
        cu_temporal=np.concatenate([[0], np.cumsum(grids[:, 0])]),
        cu_rows=np.concatenate([[0], np.cumsum(np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0]))]),
    )


def token_view(frames: Array, family: Family, temporal: int | None = None) -> Array:
    """Frames of one clip (numpy or torch, either order of channels) as [t, h/m, w/m, m, m, 3, temporal, patch, patch].

    Always a view: axes are cut and exchanged. To flatten it into rows is a copy (unless a clip is one patch), since
    neighbours in a frame lie in different rows. `temporal`: frames of a patch, by default the
    family's; it must divide n.
    """
    temporal = family.temporal_patch_size if temporal is None else temporal
    patch, merge = family.patch_size, merge_of(family)
    shape: tuple[int, ...] = frames.shape  # type: ignore[attr-defined]
    last = is_channels_last(shape)
    h, w = shape[1:3] if last else shape[2:]
    plane = (h // (patch * merge), merge, patch, w // (patch * merge), merge, patch)
    time = (shape[0] // temporal, temporal)
    if last:  # t, f, y, my, py, x, mx, px, c
        return _exchanged(frames, (*time, *plane, CHANNELS), (0, 2, 5, 3, 6, 8, 1, 4, 7))
    return _exchanged(frames, (*time, CHANNELS, *plane), (0, 3, 6, 4, 7, 2, 1, 5, 8))


def row_view(rows: Array, grid: Sequence[int], family: Family) -> Array:
    """Rows of one clip [t·h·w, patch_dim], with the axes of `token_view`; a view, of the dtype of the rows."""
    t, h, w = (int(n) for n in grid)
    merge, patch = merge_of(family), family.patch_size
    cells = (t, h // merge, w // merge, merge, merge)
    values = (CHANNELS, family.temporal_patch_size, patch, patch)
    return rows.reshape(*cells, *values)  # type: ignore[attr-defined, no-any-return]


def is_channels_last(shape: Sequence[int]) -> bool:
    """Whether a frame-major shape ends with the channels; no side of a frame is 3 pixels long."""
    return int(shape[3]) == CHANNELS


def merge_of(family: Family) -> int:
    """Patches along a side of what lies together in rows: tiles are read row by row."""
    return family.spatial_merge_size if family.pixel_layout == "patches" else 1


def _exchanged(x: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    if isinstance(x, np.ndarray):
        return x.reshape(shape).transpose(axes)
    return x.view(shape).permute(axes)


def _channels_last(shapes: Sequence[Sequence[int]]) -> bool:
    orders = set()
    for i, shape in enumerate(shapes):
        if len(shape) != 4 or CHANNELS not in (shape[1], shape[3]):
            raise ArgumentError(
                f"plan_patches: clip {i} has shape {[int(n) for n in shape]}, expected [n, h, w, 3] or [n, 3, h, w]. "
                "Fix: pass decoded RGB frames"
            )
        orders.add(is_channels_last(shape))
    if len(orders) > 1:
        raise ArgumentError(
            "plan_patches: channels come first in some clips and last in others. Fix: use one order for all"
        )
    return orders != {False}


def _size(shape: Sequence[int], last: bool, unit: int, clip: int) -> tuple[int, int, int]:
    n, h, w = (int(shape[k]) for k in ((0, 1, 2) if last else (0, 2, 3)))
    if min(n, h, w) < 1 or h % unit or w % unit:
        raise ArgumentError(
            f"plan_patches: clip {clip} has {n} frames of {w}×{h}, not multiples of {unit}, which patches cover. "
            "Fix: resize as the processor does"
        )
    return n, h, w


def _kept(keep: Sequence[int] | None, patches: int, clip: int) -> np.ndarray:
    if keep is None:
        return np.arange(patches, dtype=np.int64)
    fix = "pass numbers of at least one of them, ascending"
    numbers = read_numbers(f"plan_patches: keep[{clip}]", keep, fix)
    exist = len(numbers) and numbers[0] >= 0 and numbers[-1] < patches
    if not exist or (np.diff(numbers) <= 0).any():
        raise ArgumentError(
            f"plan_patches: keep[{clip}] is {numbers.tolist()[:8]}, the clip has temporal patches 0 to {patches - 1}. "
            f"Fix: {fix}"
        )
    return numbers
