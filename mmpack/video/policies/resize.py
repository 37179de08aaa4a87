"""Sizes that the Qwen-VL resizes give: multiples of `factor` near the shape, within an area in pixels.

Three rules in use: qwen-vl-utils' and transformers' Qwen2-VL's bound a frame, transformers' Qwen3-VL's a whole video.
Sizes are (width, height); None where upstream refuses.
"""

from __future__ import annotations

import math

Size = tuple[int, int]

MAX_RATIO = 200


def utils_size(size: Size, factor: int, low: float, high: float) -> Size | None:
    """qwen-vl-utils 0.0.14: each side at least `factor` to begin with; too small a limit can leave 0."""
    return _fitted(size, factor, low, high, smallest=factor, shrunk=0)


def qwen2_size(size: Size, factor: int, low: int, high: int) -> Size | None:
    """transformers' Qwen2-VL."""
    return _fitted(size, factor, low, high, smallest=0, shrunk=factor)


def qwen3_size(
    size: Size, factor: int, low: int, high: int, frames: int, patch: int, *, round_up: bool
) -> Size | None:
    """transformers' Qwen3-VL: `low` and `high` bound the area times `frames`, these to whole temporal patches.

    `round_up`: before 5.15; since then they are rounded (halves to even), and small frames enlarged.
    """
    width, height = size
    if not round_up and min(size) < factor:
        scale = max(factor / height, factor / width)
        width, height = int(width * scale), int(height * scale)
    patches = math.ceil(frames / patch) if round_up else round(frames / patch)
    return _fitted(
        (width, height),
        factor,
        low,
        high,
        smallest=0,
        shrunk=factor,
        frames=frames,
        counted=patches * patch,
    )


def budget_size(size: Size, factor: int, high: int) -> Size | None:
    """transformers' Gemma 4: the largest shape of at most `high` pixels, in proportion; a thin one is a token wide."""
    width, height = size
    if min(width, height, high) <= 0:
        return None
    scale = math.sqrt(high / (height * width))
    columns, rows = (math.floor(scale * side / factor) for side in size)
    most = high // factor**2
    if rows == 0 and columns > 0:
        rows, columns = 1, min(math.floor(width / height), most)
    elif columns == 0 and rows > 0:
        rows, columns = min(math.floor(height / width), most), 1
    fits = 0 < rows * columns * factor**2 <= high
    return (columns * factor, rows * factor) if fits else None


def _fitted(
    size: Size,
    factor: int,
    low: float,
    high: float,
    *,
    smallest: int,
    shrunk: int,
    frames: int = 1,
    counted: int = 1,
) -> Size | None:
    """`counted` frames decide whether a limit is broken, `frames` by how much; sides end at `shrunk` or above."""
    if min(*size, high) <= 0 or max(size) / min(size) > MAX_RATIO:
        return None
    width, height = (max(smallest, round(side / factor) * factor) for side in size)
    area = frames * size[1] * size[0]
    if counted * height * width > high:
        beta = math.sqrt(area / high)
        width, height = (max(shrunk, math.floor(side / beta / factor) * factor) for side in size)
    elif counted * height * width < low:
        beta = math.sqrt(low / area)
        width, height = (math.ceil(side * beta / factor) * factor for side in size)
    return width, height
