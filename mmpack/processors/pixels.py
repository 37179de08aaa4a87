"""What an image processor of transformers makes of one picture: its grid (t, h, w) and patches [t·h·w, patch_dim]."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, require
from mmpack.families import Family
from mmpack.processors.cache import Processed


def process(
    image_processor: Any, pixels: np.ndarray, backend: str, family: Family, where: str
) -> Processed:
    """Run `image_processor` on uint8 [h, w, 3]. Raises: ArgumentError for a picture that it refuses."""
    image = require("PIL.Image", "hf", where).fromarray(pixels)
    kind = "np" if backend == "pil" else "pt"
    try:
        out = image_processor(images=[image], return_tensors=kind, **image_options(family))
    except ValueError as error:  # a shape that it can't resize
        why = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"{where}: the image processor refuses an image of {image.width}×{image.height} ({why}). "
            "Fix: another image"
        ) from None
    made = np.asarray(out["pixel_values"])
    if family.pixel_layout == "tiles":
        return patches_of(made, family)
    t, h, w = (int(n) for n in out["image_grid_thw"][0])
    return Processed((t, h, w), made)


def image_options(family: Family) -> dict[str, Any]:
    """What the family's processor of transformers hands to its image processor beside the image."""
    return {"crop_to_patches": True} if family.pixel_layout == "tiles" else {}


def patches_of(tiles: np.ndarray, family: Family) -> Processed:
    """[t, 3, height, width] as patches (channels, height, width), row by row, tile after tile."""
    size = family.patch_size
    t, channels, height, width = tiles.shape
    h, w = height // size, width // size
    cells = tiles.reshape(t, channels, h, size, w, size).transpose(0, 2, 4, 1, 3, 5)
    return Processed((t, h, w), np.ascontiguousarray(cells).reshape(t * h * w, family.patch_dim))
