"""Pictures as lines of patches: [n, longest, patch_dim] with the places [n, longest, 2] (x, y; -1 where none is).

A tower of `pixel_layout` "padded" reads them. A medium's patches lie row by row without padding. Values of such a patch
are height, width, channels, as transformers' processor has them; those of other families channels, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmpack.families import Family

CHANNELS = 3


def lines_of(
    pixels: torch.Tensor, sizes: Sequence[tuple[int, int]], longest: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lines of pictures of `sizes` (h, w) in patches, whose rows lie one after the other in `pixels`.

    `longest`: at least so many patches a line; by default as many as the largest picture has.
    Returns: values as `pixels`, places int64 on its device.
    """
    counts = [h * w for h, w in sizes]
    width = max(longest, *counts)
    if counts == [width] * len(counts):
        values = pixels.reshape(len(counts), width, -1)
    else:
        values = torch.nn.utils.rnn.pad_sequence(list(pixels.split(counts)), batch_first=True)
        short = width - values.shape[1]
        values = torch.nn.functional.pad(values, (0, 0, 0, short)) if short else values
    places = np.full((len(counts), width, 2), -1, dtype=np.int64)
    for line, (h, w) in zip(places, sizes, strict=True):
        line[: h * w, 0] = np.tile(np.arange(w), h)
        line[: h * w, 1] = np.repeat(np.arange(h), w)
    return values, torch.from_numpy(places).to(pixels.device)


def channels_last(rows: torch.Tensor, family: Family) -> torch.Tensor:
    """Rows of patches of channels, height, width, in the order that the family's tower reads."""
    if family.pixel_layout != "padded":
        return rows
    size = family.patch_size
    return rows.view(-1, CHANNELS, size, size).permute(0, 2, 3, 1).reshape(rows.shape)


def channels_first(rows: torch.Tensor, family: Family) -> torch.Tensor:
    """What `channels_last` was given."""
    if family.pixel_layout != "padded":
        return rows
    size = family.patch_size
    return rows.reshape(-1, size, size, CHANNELS).permute(0, 3, 1, 2).reshape(rows.shape)
