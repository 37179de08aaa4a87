"""How a picture looked: the thumbnail that was recorded of it, and what of two thumbnails follows.

A thumbnail is uint8 [8, 8, 3], the mean colour of each cell of the pixels handed to the processor: resizing and
encoding again leave it nearly as it was, cropping, padding, painting and another picture don't.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from mmpack.processors.images import PICTURE, THUMBNAIL
from mmpack.schema.media import Medium

# a thumbnail's cells differ by so many times what two of one image do, or it shows nothing
CLEAR = 8
SAME = 2  # levels that rounding makes of one picture's cells
LOSSY = ("JPEG", "WEBP", "MPO", "AVIF")
UNLIKE = 4  # levels that no rounding makes

# by EXIF orientation: how a picture as it lies in the file, [h, w, 3], becomes upright
_UPRIGHT: dict[int, Any] = {
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x[:, ::-1].swapaxes(0, 1),
}


def about(medium: Medium, name: str) -> Any:
    """Return what metadata recorded of a picture; None if it didn't."""
    found = medium.metadata.get(PICTURE)
    return found.get(name) if isinstance(found, dict) else None


def thumbnail(medium: Medium) -> np.ndarray | None:
    """int [8, 8, 3]."""
    return _read(about(medium, "thumbnail"))


def _read(text: Any) -> np.ndarray | None:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return None
    if len(data) != THUMBNAIL * THUMBNAIL * 3:
        return None
    return np.frombuffer(data, np.uint8).reshape(THUMBNAIL, THUMBNAIL, 3).astype(int)


def alike(a: Medium, b: Medium) -> bool | None:
    """Whether two images look the same, whatever their sizes; None if thumbnails are missing, or too even to say."""
    one, two = thumbnail(a), thumbnail(b)
    return None if one is None or two is None else _alike(one, two)


def closely(a: Medium, b: Medium, orientation: int = 1, levels: int = UNLIKE) -> bool:
    """Whether they look the same to a few levels, as a resize of the whole leaves them and cutting 5 % off doesn't.

    `orientation`: the EXIF tag by which one of them was turned upright.
    """
    one, two = thumbnail(a), thumbnail(b)
    if one is None or two is None:
        return False
    if orientation == 1:
        return _closely(one, two, levels)
    upright = _UPRIGHT[orientation]
    return _closely(upright(one), two, levels) or _closely(one, upright(two), levels)


def turned(a: Medium, b: Medium, orientation: int) -> bool | None:
    """Whether one image is the other, turned upright by an EXIF orientation; None if nothing shows it."""
    one, two = thumbnail(a), thumbnail(b)
    if one is None or two is None or orientation not in _UPRIGHT:
        return None
    upright = _UPRIGHT[orientation]
    if _alike(one, two):
        return None if _alike(upright(one), one) is not False else False
    return bool(_alike(upright(one), two) or _alike(one, upright(two)))


def flattened(a: Medium, b: Medium) -> bool | None:
    """Whether one image is the other, transparent one over another background; None if nothing shows it."""
    verdicts = [_flattened(m, other) for m, other in ((a, b), (b, a))]
    return True if True in verdicts else None if None in verdicts else False


def _flattened(clear: Medium, other: Medium) -> bool | None:
    if about(clear, "transparent") is False:
        return False
    mine, found = thumbnail(other), about(clear, "flattened")
    if mine is None or not isinstance(found, dict):
        return None
    levels = SAME if clear.size == other.size else UNLIKE
    for text in found.values():
        made = _read(text)
        if made is not None and np.abs(made - mine).max() <= levels:
            plain = _spread(mine) < CLEAR  # as a picture that stands in for a broken one is
            return None if plain and not about(other, "transparent") else True
    return False


def _alike(one: np.ndarray, two: np.ndarray) -> bool | None:
    unlike = np.abs(one - two).max()
    spread = min(_spread(one), _spread(two))
    if spread >= CLEAR * max(unlike, 1):
        return True
    return False if unlike > UNLIKE and 2 * unlike > spread else None


def _closely(one: np.ndarray, two: np.ndarray, levels: int) -> bool:
    unlike = np.abs(one - two).max()
    spread = min(_spread(one), _spread(two))
    return bool(unlike <= levels and spread >= 2 * CLEAR * max(unlike, 1))


def _spread(cells: np.ndarray) -> int:
    return int((cells.max(axis=(0, 1)) - cells.min(axis=(0, 1))).max())
