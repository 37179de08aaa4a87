"""The display matrix of a picture: quarter turns that make it upright."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.errors import VideoError


def rotation_of(picture: Any, where: str) -> int:
    """Degrees clockwise (0, 90, 180 or 270) that turn `picture` (av.VideoFrame) upright.

    Raises: VideoError where its matrix mirrors, skews, or turns by another angle.
    """
    matrix = picture.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0
    a, b, _, c, d, *_ = np.frombuffer(bytes(matrix), "<i4").tolist()
    if a * d - b * c <= 0 or (a and b) or (c and d):
        raise VideoError(
            f"{where}: its display matrix mirrors or skews the frames. Fix: encode the frames as they should be seen"
        )
    return -int(picture.rotation) % 360
