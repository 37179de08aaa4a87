"""Pictures as lines of patches: [n, longest, patch_dim] beside the places [n, longest, 2] (x, y; -1 where none is).

A tower of `pixel_layout` "padded" reads them. Elsewhere patches lie row by row without padding, [rows, patch_dim] of
channels, height, width; in a line a patch is height, width, channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmpack.families import Family

CHANNELS = 3


def lines_of(
    pixels: torch.Tensor, sizes: Sequence[tuple[int, int]], family: Family, longest: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lines of pictures of `sizes` (h, w) in patches, whose rows lie one after the other in `pixels`.

    `longest`: at least so many patches a line; by default as many as the largest picture has.
    Returns: values as `pixels`, places int64 on its device.
    """
    counts = [h * w for h, w in sizes]
    width = max(longest, *counts)
    patch = family.patch_size
    cells = pixels.reshape(-1, CHANNELS, patch, patch).permute(0, 2, 3, 1).reshape(pixels.shape)
    if counts == [width] * len(counts):
        values = cells.reshape(len(counts), width, -1)
    else:
        values = torch.nn.utils.rnn.pad_sequence(list(cells.split(counts)), batch_first=True)
        short = width - values.shape[1]
        values = torch.nn.functional.pad(values, (0, 0, 0, short)) if short else values
    places = np.full((len(counts), width, 2), -1, dtype=np.int64)
    for line, (h, w) in zip(places, sizes, strict=True):
        line[: h * w, 0] = np.tile(np.arange(w), h)
        line[: h * w, 1] = np.repeat(np.arange(h), w)
    return values, torch.from_numpy(places).to(pixels.device)
