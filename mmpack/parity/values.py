"""Whether two recorded values are one: numbers as far as what they were written with can tell.

A number that went through float32, or was written with six digits or six decimals, is the same number. Whole numbers
(pixels, frames, ids) are compared exactly.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mmpack.schema.specs import INT_MAX

# relative: half a unit of the sixth digit; float32 errs less, 30000/1001 is not 30 (1e-3)
DIGITS = 5e-6
DECIMALS = 5e-7  # absolute: half a unit of the sixth decimal


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of JSON, or arrays of them, are one; what is no JSON is one only with itself, NaN never."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, _LISTS) and isinstance(b, _LISTS):
        a, b = _listed(a), _listed(b)
        return a == b or (len(a) == len(b) and all(map(same_value, a, b)))
    if isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
        return bool(a == b) or _close(a, b)
    return a is b or (isinstance(a, str | bytes) and isinstance(b, str | bytes) and a == b)


_LISTS = (list, tuple, np.ndarray)
_NUMBERS = (int, float, np.number, np.bool_)


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _close(a: Any, b: Any) -> bool:
    whole = [isinstance(x, int | np.integer) or float(x).is_integer() for x in (a, b)]
    far = [isinstance(x, int) and abs(x) > INT_MAX for x in (a, b)]  # no float holds it
    if all(whole) or any(far) or not (math.isfinite(a) and math.isfinite(b)):
        return False
    return bool(abs(a - b) <= max(DIGITS * max(abs(a), abs(b)), DECIMALS))
