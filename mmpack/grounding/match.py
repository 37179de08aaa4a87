"""Which prediction is matched with which target: one to one, so that the sum of their values is the largest."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of, require


def match(values: Any, allowed: Any = None) -> list[tuple[int, int]]:
    """Pairs (row, column) of `values` [n, m] with the largest sum, in order of rows (the Hungarian method).

    Args: `values`: finite numbers. `allowed`: bool [n, m], pairs that may be matched, by default all. As many pairs as
    can be are matched first, then the sum is the largest: a pair of low value is matched rather than none.
    Equal sums are settled by scipy, the same way each time.
    Raises: ArgumentError; MissingExtraError without scipy, where there is more than one row and one column.
    """
    array = _checked(values)
    if allowed is None:
        allowed = np.ones(array.shape, bool)
    try:
        allowed = np.asarray(allowed)
    except Exception:  # rows of several lengths; what else was given says so itself
        allowed = np.asarray(None)
    if allowed.shape != array.shape or allowed.dtype != bool:
        raise ArgumentError(
            f"match: allowed has shape {list(allowed.shape)} and dtype {allowed.dtype}, "
            f"expected bool {list(array.shape)}. Fix: pass one bool for each value"
        )
    if not allowed.any():
        return []
    # no sum of allowed values is worth another pair that is not allowed
    spread = float(np.abs(array[allowed]).max()) or 1.0
    worth = np.where(allowed, array / spread, -2.0 * (min(array.shape) + 1))
    if min(array.shape) == 1:
        best = int(worth.argmax())
        pairs = [divmod(best, array.shape[1])]
    else:
        optimize = require("scipy.optimize", "grounding", "match")
        pairs = list(
            zip(*map(np.ndarray.tolist, optimize.linear_sum_assignment(worth, True)), strict=True)
        )
    return [(row, column) for row, column in pairs if allowed[row, column]]


def _checked(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
        fits = array.ndim == 2 and (array.dtype.kind in "iuf" or not array.size)
    except Exception:
        fits = False
    if not fits:
        raise ArgumentError(
            f"match: values is {kind_of(values)}, expected numbers [n, m]. Fix: pass a matrix"
        )
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ArgumentError(
            "match: values holds NaN or infinity. Fix: pass allowed= for pairs that can't be matched"
        )
    return array
