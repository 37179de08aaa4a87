"""What an image processor of transformers makes of one picture: grids (t, h, w) and patches [t·h·w, patch_dim]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, require
from mmpack.families import Family
from mmpack.processors.cache import Processed

PIXELS = ("float32", "uint8")  # what processed pixels may be held as
# what makes a processor of transformers leave out the last step, from bytes to floats
AS_BYTES = {"do_rescale": False, "do_normalize": False}


class Cut(NamedTuple):
    """What an image processor made of one picture: one view, or several that are media of their own."""

    grids: list[tuple[int, int, int]]  # (t, h, w) patches of each view
    pixel_values: np.ndarray  # [patches, patch_dim], view after view
    rows: int = 0  # of slices
    columns: int = 0
    tokens: int | None = None  # where the grids don't say them


def process(
    image_processor: Any,
    pixels: np.ndarray,
    backend: str,
    family: Family,
    where: str,
    kept_as: str = "float32",
) -> Cut:
    """Run `image_processor` on uint8 [h, w, 3]. `kept_as`: one of PIXELS.

    Raises: ArgumentError for a picture that it refuses, and for `uint8` where its resize makes no bytes.
    """
    image = require("PIL.Image", "hf", where).fromarray(pixels)
    kind = "np" if backend == "pil" else "pt"
    options = image_options(family, image_processor) | (AS_BYTES if kept_as == "uint8" else {})
    try:
        out = image_processor(images=[image], return_tensors=kind, **options)
    except (ValueError, ZeroDivisionError) as error:  # a shape that it can't resize
        why = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"{where}: the image processor refuses an image of {image.width}×{image.height} ({why}). "
            "Fix: use another image"
        ) from None
    made = np.asarray(out["pixel_values"])
    if kept_as == "uint8":
        made = as_bytes(made, where)
    if family.pixel_layout == "strip":
        rows, columns = (int(n) for n in out["grids"][0])
        sizes = [(1, int(h), int(w)) for h, w in np.asarray(out["target_sizes"])]
        return Cut(sizes, _patches_of_strip(made[0], family), rows, columns)
    if family.tokens_by_size is not None:
        grid, patches = patches_of(made[0], family)
        sizes = image_processor.image_grid_pinpoints
        height, width = pixels.shape[:2]
        tokens = family.tokens_by_size((height, width), grid[1], made.shape[-1], sizes)
        return Cut([grid], patches, tokens=tokens)
    if family.views is not None:  # tiles, of one picture of one sample
        rows, columns = (int(out[name][0][0]) for name in ("rows", "cols"))
        (t, h, w), patches = patches_of(made[0], family)
        return Cut([(1, h, w)] * t, patches, rows, columns)
    if family.pixel_layout in ("tiles", "canvas"):
        done = patches_of(made, family)
    elif family.pixel_layout == "padded":
        done = patches_of_lines(made, np.asarray(out["image_position_ids"]), family)
    else:
        t, h, w = (int(n) for n in out["image_grid_thw"][0])
        done = Processed((t, h, w), made.reshape(t * h * w, family.patch_dim))
    return Cut([done.grid_thw], done.pixel_values)


def as_bytes(made: np.ndarray, where: str) -> np.ndarray:
    """uint8 of resized pixels, which some processors hand on as floats. Raises: ArgumentError if they are no bytes."""
    if made.dtype == np.uint8:
        return made
    out = np.clip(np.nan_to_num(made), 0, 255).astype(np.uint8)
    if not np.array_equal(out, made):
        raise ArgumentError(
            f"{where}: the processor's resize makes {made.dtype} values between whole bytes (its frames are floats, "
            "as qwen-vl-utils hands them on). Fix: pass wrap_processor(…, pixels='float32')"
        )
    return out


def image_options(family: Family, image_processor: Any) -> dict[str, Any]:
    """What the family's processor of transformers hands to its image processor in addition to the image.

    Of the `defaults` only what the image processor does not set itself.
    """
    unset = {
        name: value
        for name, value in family.images.defaults
        if getattr(image_processor, name, None) is None
    }
    if family.pixel_layout == "canvas":  # sides are whole merged patches
        unset["patch_size"] = family.patch_size * family.spatial_merge_size
    return unset | dict(family.images.passed)


def view_side(image_processor: Any) -> int | None:
    """Pixels of a view's side, where all views are squares of one size; else None."""
    if not hasattr(image_processor, "do_image_splitting"):
        return None  # video processors have a max_image_size that they don't read
    return int(image_processor.max_image_size["longest_edge"])


def patches_of_lines(lines: np.ndarray, places: np.ndarray, family: Family) -> Processed:
    """[t, longest, patch_dim] of pictures of one size, places [t, longest, 2] (-1: padding), as rows of patches."""
    w, h = (int(n) + 1 for n in places[0].max(axis=0))
    rows = np.ascontiguousarray(lines[:, : h * w]).reshape(len(lines) * h * w, family.patch_dim)
    return Processed((len(lines), h, w), rows)


def patches_of(tiles: np.ndarray, family: Family) -> Processed:
    """[t, 3, height, width] as patches (channels, height, width), row by row, tile after tile."""
    size = family.patch_size
    t, channels, height, width = tiles.shape
    h, w = height // size, width // size  # what is left at the edges, no tower of tiles reads
    tiles = tiles[:, :, : h * size, : w * size]
    cells = tiles.reshape(t, channels, h, size, w, size).transpose(0, 2, 4, 1, 3, 5)
    return Processed((t, h, w), np.ascontiguousarray(cells).reshape(t * h * w, family.patch_dim))


def _patches_of_strip(strip: np.ndarray, family: Family) -> np.ndarray:
    """[3, side, patches · side] as patches."""
    side = family.patch_size
    patches = strip.reshape(3, side, -1, side).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(patches).reshape(-1, family.patch_dim)
