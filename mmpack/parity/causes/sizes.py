"""Evidence of images' sizes and settings: the grid that a processor makes, a size that an earlier resize made.

Sizes are (width, height) in pixels, grids (t, h, w) in patches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.schema.media import Medium
from mmpack.video.policies.resize import Size, qwen2_size, utils_size

FACTORS = (28, 32)  # to whose multiples loaders resize
UTILS = (4, 16384)  # qwen-vl-utils' limits, in squares of the factor
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
SHAPE = 0.05  # by how much log(width / height) differs for two shapes
SMALLEST_RESIZE = 0.05  # a resize by less may be a crop


def grid_of(size: Size, part: Any) -> tuple[int, int, int] | None:
    """Grid that transformers' Qwen-VL processors make of a size; `part`: `processor["image"]`. None: not known."""
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
    if not isinstance(part, dict) or min(size) <= 0 or "crop_to_patches" in part:
        return None
    values = [v for name in names if type(v := part.get(name)) is int and v > 0]
    if len(values) < len(names) or part.get("do_resize") is False:
        return None
    patch, merge, low, high = values
    fitted = qwen2_size(size, patch * merge, low, high)
    return None if fitted is None else (1, fitted[1] // patch, fitted[0] // patch)


def upright(medium: Medium) -> bool | None:
    """Whether a picture that lies on its side in its file was turned by its EXIF orientation; None: not known."""
    if medium.exif_orientation not in TURNED or not medium.size or not medium.decoded_size:
        return None
    lying, handed = _shape(medium.decoded_size), _shape(medium.size)
    if lying is None or handed is None or min(abs(lying), abs(handed)) < SHAPE:
        return None
    return (lying > 0) != (handed > 0)


def swapped(a: Medium, b: Medium) -> bool:
    """Whether width and height, or those of the grid, are swapped."""
    if a.size and b.size:
        return a.size != b.size and tuple(a.size) == tuple(b.size)[::-1]
    (_, *one), (_, *two) = a.grid_thw, b.grid_thw
    return one != two and one == two[::-1]


def lying(a: Medium, b: Medium) -> bool:
    """Whether two sizes are of one shape only if one is turned."""
    one, two = (_shape(m.size) for m in (a, b))
    return one is not None and two is not None and abs(one + two) < 2 * SHAPE < abs(one - two)


def rescaled(a: Size, b: Size) -> bool:
    """Whether both sizes have one shape, to a factor's rounding, and too different for a small crop."""
    return (
        min(*a, *b) > 0
        and _one_shape(a, b, max(FACTORS))
        and all(abs(np.log(x / y)) >= SMALLEST_RESIZE for x, y in zip(a, b, strict=True))
    )


def refitted(a: Size, b: Size, parts: tuple[Any, Any]) -> bool | None:
    """Whether one size is what a loader's resize makes of the other, under known limits; None: it may be cut or padded.

    Sizes that lie within a factor of each other, both smaller or both larger, may have been cut or padded to a
    multiple.
    """
    if not any(b == size for size in _fits(a, parts)) and not any(a == s for s in _fits(b, parts)):
        return False
    steps = [y - x for x, y in zip(a, b, strict=True)]
    near = all(abs(step) < max(FACTORS) for step in steps)
    return None if near and (min(steps) >= 0 or max(steps) <= 0) else True


def _fits(size: Size, parts: tuple[Any, Any]) -> set[Size | None]:
    """Sizes that loaders make of a size, by the limits of either side or qwen-vl-utils' own."""
    out: set[Size | None] = set()
    for factor in FACTORS:
        limits = [(UTILS[0] * factor**2, UTILS[1] * factor**2)]
        for part in parts:
            known = part if isinstance(part, dict) else {}
            low, high = known.get("min_pixels"), known.get("max_pixels")
            limits += (
                [(low, high)] if type(low) is int and type(high) is int and 0 < low <= high else []
            )
        for low, high in limits:
            out |= {rule(size, factor, low, high) for rule in (utils_size, qwen2_size)}
    return out - {None}


def _one_shape(a: Size, b: Size, slack: int) -> bool:
    low = max((y - slack) / x for x, y in zip(a, b, strict=True))
    high = min((y + slack) / x for x, y in zip(a, b, strict=True))
    return low < high


def _shape(size: Size | None) -> float | None:
    return float(np.log(size[0] / size[1])) if size and min(size) > 0 else None
