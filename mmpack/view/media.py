"""Pixels of media: handed in by content, or read below the caller's root; and as a `data:` address of a page.

Pixels are uint8 [h, w, 3]. Files are opened below the root only, and compared with the recorded content.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from mmpack.errors import MissingExtraError, MmpackError, require
from mmpack.layout.fingerprint import content_hash
from mmpack.processors.images import rgb_pixels
from mmpack.schema.media import Medium
from mmpack.view.parts import Box, Drawing, Lattice, Picture

# a medium -> uint8 [h, w, 3] or None, and what to say about it
Find = Callable[[Medium], tuple[np.ndarray | None, str]]


def finder(root: str | os.PathLike[str] | None, known: Mapping[str, np.ndarray] | None) -> Find:
    """Where pictures are looked for: in `known` by content_hash, then in files below `root` by `Medium.source`."""

    def find(medium: Medium) -> tuple[np.ndarray | None, str]:
        pixels = (known or {}).get(medium.content_hash or "")
        if pixels is not None and pixels.ndim == 4:  # of a video the frame in the middle
            return pixels[len(pixels) // 2], ""
        if pixels is not None or medium.modality != "image" or root is None:
            return pixels, ""
        if medium.source is None:
            return None, "no source recorded"
        try:
            pixels, _ = rgb_pixels(medium.source, Path(root), "picture")
        except MissingExtraError:
            raise
        except MmpackError as error:
            return None, str(error)
        same = medium.content_hash in (None, content_hash("image", pixels))
        return pixels, "" if same else "the file's pixels are not those recorded"

    return find


def data_uri(pixels: np.ndarray, longest: int) -> str:
    """A PNG of uint8 [h, w, 3], no longer than a screen of two pixels per CSS pixel shows."""
    out = io.BytesIO()
    image = require("PIL.Image", "view", "a thumbnail").fromarray(pixels)
    image.thumbnail((2 * longest, 2 * longest))
    image.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def thumbnail(
    medium: Medium,
    pixels: np.ndarray | None,
    longest: int,
    label: str,
    ratio: float,
    most: float,
    *over: Lattice,
) -> Drawing:
    """The pixels, else the shape of a medium, under the shapes `over`.

    `ratio`: width over height where neither pixels nor the medium say it; `most`: how far from square it is drawn.
    """
    if pixels is not None:
        ratio = pixels.shape[1] / pixels.shape[0]
    elif medium.size is not None and min(medium.size) > 0:
        ratio = medium.size[0] / medium.size[1]
    ratio = min(max(ratio, 1 / most), most)
    width, height = (longest, longest / ratio) if ratio >= 1 else (longest * ratio, longest)
    empty = Box(0, 0, width, height, f"mm-{medium.modality} mm-empty")
    back = empty if pixels is None else Picture(pixels, longest, 0, 0, width, height)
    return Drawing([back, *over], height, label, width, fixed=True)
