"""How well two boxes, or a point and a box, agree. Boxes are [n, 4] x0, y0, x1, y1, points [n, 2]; float64 results.

A box without area is a box of area 0: it overlaps nothing, itself included. NaN, infinities and swapped corners are
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_number, kind_of


def iou(boxes: Any, others: Any) -> np.ndarray:
    """Intersection over union of each of `boxes` [n, 4] with each of `others` [m, 4]: float64 [n, m], from 0 to 1.

    0 where the union has no area. Raises: ArgumentError if these are not arrays of boxes.

    Example:
        >>> from mmpack.grounding import iou
        >>> iou([[0, 0, 2, 2]], [[1, 0, 3, 2], [0, 0, 2, 2]]).round(3).tolist()
        [[0.333, 1.0]]
    """
    a, b = _scaled(_boxes("iou", "boxes", boxes), _boxes("iou", "others", others))
    intersection, union = _areas(a, b)
    return _divided(intersection, union)


def giou(boxes: Any, others: Any) -> np.ndarray:
    """Generalized IoU of each of `boxes` [n, 4] with each of `others` [m, 4]: float64 [n, m], from -1 to 1.

    IoU - (area of the smallest box around both - union) / that area (Rezatofighi et al. 2019, algorithm 1); where that
    area is 0, -1 (two boxes without area, apart or not). Raises: ArgumentError if these are not arrays of boxes.
    """
    a, b = _scaled(_boxes("giou", "boxes", boxes), _boxes("giou", "others", others))
    intersection, union = _areas(a, b)
    around = np.maximum(a[..., 2:], b[..., 2:]) - np.minimum(a[..., :2], b[..., :2])
    hull = around[..., 0] * around[..., 1]
    empty: np.ndarray = np.where(hull > 0, _divided(hull - union, hull), 1.0)
    return _divided(intersection, union) - empty


def point_in_box(points: Any, boxes: Any) -> np.ndarray:
    """1.0 where a point of [n, 2] lies in a box of [m, 4], edges included, else 0.0: [n, m].

    Raises: ArgumentError for what is no array of points or boxes.
    """
    p = _numbers("point_in_box", "points", points, 2)
    b = _boxes("point_in_box", "boxes", boxes)
    inside = (p[:, None] >= b[None, :, :2]) & (p[:, None] <= b[None, :, 2:])
    return np.asarray(inside.all(axis=-1), np.float64)


def centre_distance(places: Any, others: Any, diagonal: float) -> np.ndarray:
    """Distance between the centres of `places` and `others`, divided by `diagonal`: float64 [n, m].

    Args: `places`, `others`: [n, 4] and [m, 4] boxes or [n, 2] and [m, 2] points, in a unit that is the same length in
    x and y (pixels). `diagonal`: the picture's, in this unit, above 0. Within the picture the result is from 0 to 1.
    Raises: ArgumentError if these are not arrays of boxes or points.
    """
    check_number("centre_distance", "diagonal", diagonal, above=0)
    a, b = (_centres("centre_distance", n, v) for n, v in (("places", places), ("others", others)))
    apart = a[:, None] / diagonal - b[None] / diagonal
    distance: np.ndarray = np.hypot(apart[..., 0], apart[..., 1])
    return distance


# ---- parts ---------------------------------------------------------------------------------------


def _areas(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intersection and union [n, m]."""
    size = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    size = np.maximum(size, 0.0)
    intersection = size[..., 0] * size[..., 1]
    one, two = ((x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (a, b))
    return intersection, one + two - intersection


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _scaled(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each pair [n, m, 4] over a power of two of its own, so that no area overflows, whatever the other boxes are."""
    largest = np.maximum(np.abs(a).max(axis=1)[:, None], np.abs(b).max(axis=1)[None])
    _, exponent = np.frexp(largest)
    return tuple(np.ldexp(x, -exponent[..., None]) for x in (a[:, None], b[None]))  # type: ignore[return-value]


def _centres(what: str, name: str, value: Any) -> np.ndarray:
    array = _numbers(what, name, value, None)
    if array.shape[1] == 2:
        return array
    _check_corners(what, name, array)
    return array[:, :2] / 2 + array[:, 2:] / 2


def _boxes(what: str, name: str, value: Any) -> np.ndarray:
    array = _numbers(what, name, value, 4)
    _check_corners(what, name, array)
    return array


def _check_corners(what: str, name: str, array: np.ndarray) -> None:
    swapped = np.flatnonzero((array[:, :2] > array[:, 2:]).any(axis=1))
    if len(swapped):
        raise ArgumentError(
            f"{what}: {name}[{swapped[0]}] is {array[swapped[0]].tolist()}, with its corners swapped. "
            "Fix: pass x0, y0, x1, y1"
        )


def _numbers(what: str, name: str, value: Any, width: int | None) -> np.ndarray:
    """float64 [n, width]; an empty list is [0, width]."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "iuf":
            raise TypeError
        array = array.astype(np.float64)
    except Exception:
        raise ArgumentError(
            f"{what}: {name} is {kind_of(value)}, which is not an array of numbers. "
            f"Fix: pass floats [n, {width or '4 or 2'}]"
        ) from None
    if array.size == 0 and array.ndim in (1, 2):
        return np.zeros((0, width or 4))
    if array.ndim != 2 or array.shape[1] not in ((2, 4) if width is None else (width,)):
        raise ArgumentError(
            f"{what}: {name} has shape {list(array.shape)}, expected [n, {width or '4 or 2'}]. "
            "Fix: pass one row per item, even for a single one"
        )
    if not np.isfinite(array).all():
        raise ArgumentError(
            f"{what}: {name} holds NaN or infinity. Fix: drop that row, or find where it is produced"
        )
    return array
