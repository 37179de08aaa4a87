"""One call of pack_video or unpack_video as records: where frames and rows lie, and what becomes of the values.

Both ops' schemas are made of the fields, in this order. Every implementation takes the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpack.families import Family, get_family
from mmpack.video.patches import CHANNELS


class PatchLayout(NamedTuple):
    """Where the values of clips and of rows lie.

    `patches`: first row, h, w in patches, clip; then where each slot's frame starts in one buffer.
    """

    patches: Tensor  # [T, 4 + slots] int64
    blocks: Tensor  # [tokens, 4] int32: temporal patch, first of its rows there, first pixel (y, x)
    sizes: Sequence[int]  # 3 per clip: frames, height, width
    kept: (
        Sequence[int] | None
    )  # temporal patches that are rows, each clip's ended by -1; None: all are
    num_rows: int
    num_values: int
    family: str
    channels_last: bool

    @property
    def geometry(self) -> Family:
        """The family, whose patch sizes count here."""
        return get_family(self.family)


class Change(NamedTuple):
    """What becomes of values on their way from frames to rows."""

    mean: Sequence[float] | None
    std: Sequence[float] | None
    rescale: float | None
    dtype: torch.dtype  # of the rows
    repeat: bool  # a frame also fills the slots behind it that no frame has; else they get 0

    @property
    def factors(self) -> Factors:
        if self.mean is not None and self.std is not None:
            mean, std = scaled(self.mean, self.rescale), scaled(self.std, self.rescale)
            return Factors("normalise", mean, std, 1.0)
        ones = (1.0,) * CHANNELS
        if self.rescale is not None:
            return Factors("rescale", (0.0,) * CHANNELS, ones, self.rescale)
        return Factors("copy", (0.0,) * CHANNELS, ones, 1.0)


class Factors(NamedTuple):
    """A Change in the units of the frames. `kind`: normalise ((x − mean) / std), rescale (x · scale) or copy."""

    kind: str
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]
    scale: float


def scaled(values: Sequence[float], rescale: float | None) -> tuple[float, ...]:
    """mean or std in the units of the frames, rounded as transformers' processors round: float32 times 1/rescale."""
    factor = np.float32(1.0 if rescale is None else 1.0 / rescale)
    return tuple(float(np.float32(v) * factor) for v in values)


def find_clips(clips: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor | None, int]:
    """Where clips lie for a kernel that gets the address of the first one.

    Returns [C] int64, values that each clip is further from the first than it would be in one buffer (None for one
    buffer), and the bytes (up to 16) of which all addresses are multiples.
    """
    first, addresses = clips[0], [c.data_ptr() for c in clips]
    aligned = math.gcd(16, *addresses)
    if len(clips) == 1:
        return None, aligned
    counts = np.prod(np.array(sizes).reshape(-1, 3), axis=1) * CHANNELS
    distances = (np.array(addresses) - addresses[0]) // first.element_size()
    shifts = torch.from_numpy(distances - (np.cumsum(counts) - counts))
    if first.device.type != "cpu":
        shifts = shifts.pin_memory().to(first.device, non_blocking=True)
    return shifts, aligned
