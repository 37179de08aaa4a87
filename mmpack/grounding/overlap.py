"""How well two boxes, or a point and a box, agree, and which to match. Boxes are [n, 4] x0, y0, x1, y1, points [n, 2].

Results are float64. A box without area is a box of area 0: it overlaps nothing, itself included. Only `iou` is public
and checks what it is given; `scores` hands the others finite numbers and boxes whose corners are in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of, require


def iou(boxes: Any, others: Any) -> np.ndarray:
    """Intersection over union of each of `boxes` [n, 4] with each of `others` [m, 4]: float64 [n, m], from 0 to 1.

    0 where the union has no area. Raises: ArgumentError if these are not arrays of boxes; NaN, infinities and swapped
    corners are refused.

    Example:
        >>> from mmpack.grounding import iou
        >>> iou([[0, 0, 2, 2]], [[1, 0, 3, 2], [0, 0, 2, 2]]).round(3).tolist()
        [[0.333, 1.0]]
    """
    a, b = _scaled(_boxes("boxes", boxes), _boxes("others", others))
    intersection, union = _areas(a, b)
    return _divided(intersection, union)


def giou(boxes: Any, others: Any) -> np.ndarray:
    """Generalized IoU of each of `boxes` [n, 4] with each of `others` [m, 4]: float64 [n, m], from -1 to 1.

    IoU - (area of the smallest box around both - union) / that area (Rezatofighi et al. 2019, algorithm 1); where that
    area is 0, -1 (two boxes without area, apart or not).
    """
    a, b = _scaled(np.asarray(boxes, np.float64), np.asarray(others, np.float64))
    intersection, union = _areas(a, b)
    around = np.maximum(a[..., 2:], b[..., 2:]) - np.minimum(a[..., :2], b[..., :2])
    hull = around[..., 0] * around[..., 1]
    empty: np.ndarray = np.where(hull > 0, _divided(hull - union, hull), 1.0)
    return _divided(intersection, union) - empty


def point_in_box(points: Any, boxes: Any) -> np.ndarray:
    """1.0 where a point of [n, 2] lies in a box of [m, 4], edges included, else 0.0: [n, m]."""
    p, b = np.asarray(points)[:, None], np.asarray(boxes)[None]
    inside = (p >= b[..., :2]) & (p <= b[..., 2:])
    return np.asarray(inside.all(axis=-1), np.float64)


def match(values: np.ndarray, allowed: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (row, column) of `values` [n, m] with the largest sum, in order of rows (the Hungarian method).

    Args: `values`: finite numbers. `allowed`: bool [n, m], pairs that may be matched. As many pairs as can be are
    matched first, then the sum is the largest: a pair of low value is matched rather than none.
    Equal sums are settled by scipy, the same way each time.
    Raises: MissingExtraError without scipy, where there is more than one row and one column.
    """
    if not allowed.any():
        return []
    # no sum of allowed values is worth another pair that is not allowed
    spread = float(np.abs(values[allowed]).max()) or 1.0
    worth = np.where(allowed, values / spread, -2.0 * (min(values.shape) + 1))
    if min(values.shape) == 1:
        best = int(worth.argmax())
        pairs = [divmod(best, values.shape[1])]
    else:
        optimize = require("scipy.optimize", "grounding", "match")
        rows, columns = optimize.linear_sum_assignment(worth, True)
        pairs = list(zip(rows.tolist(), columns.tolist(), strict=True))
    return [(row, column) for row, column in pairs if allowed[row, column]]


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


def _boxes(name: str, value: Any) -> np.ndarray:
    """float64 [n, 4]; an empty list is [0, 4]."""
    try:
        array = np.asarray(value)
        fits = array.dtype.kind in "iuf" and (array.size == 0 or array.shape[1:] == (4,))
    except Exception:
        fits = False
    if not fits:
        raise ArgumentError(
            f"iou: {name} is {kind_of(value)}, which is not an array of boxes. "
            "Fix: pass floats [n, 4], one row per box"
        )
    array = array.astype(np.float64).reshape(-1, 4)
    wrong = ~np.isfinite(array).all(axis=1) | (array[:, :2] > array[:, 2:]).any(axis=1)
    if wrong.any():
        at = int(wrong.argmax())
        raise ArgumentError(
            f"iou: {name}[{at}] is {array[at].tolist()}, with NaN, infinity or its corners swapped. "
            "Fix: pass x0, y0, x1, y1"
        )
    return array
