"""Values from JSON or a command line, read as a dataclass's annotation says: `int`, `float | None`, `tuple[…]`."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError

_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int, np.integer),
    "float": (int, float, np.integer, np.floating),
    "str": (str,),
    "dict": (dict,),
}
_PLAIN = {"int": int, "float": float}
_MOST = 2**63  # whole numbers are int64 in arrays and records


def read_value(what: str, kind: str, value: Any, fix: str) -> Any:
    """`value` as the annotation `kind`, plain Python. Raises: ArgumentError naming `what`, ending in `fix`."""
    if value is None and kind.endswith("None"):
        return None
    base = kind.removesuffix(" | None")
    if base.startswith("tuple") and isinstance(value, list | tuple):
        of = base.removeprefix("tuple[").removesuffix("]").split(", ")
        if of[-1] == "..." or len(of) == len(value):
            return tuple(read_value(what, of[0], v, fix) for v in value)
    base = base.partition("[")[0]
    if isinstance(value, int) and not -_MOST <= value < _MOST:
        raise ArgumentError(f"{what} is a number beyond 64 bits. Fix: {fix}")
    if isinstance(value, _KINDS.get(base, ())) and isinstance(value, bool) == (base == "bool"):
        return _PLAIN.get(base, lambda v: v)(value)
    raise ArgumentError(f"{what} is {reprlib.repr(value):.60}, expected {kind}. Fix: {fix}")


def read_numbers(what: str, values: Any, fix: str) -> np.ndarray:
    """int64 [n] of a list, tuple, range, array or tensor. Raises: ArgumentError where one is no whole number."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | dict) or not hasattr(values, "__iter__"):
        raise ArgumentError(
            f"{what} is {reprlib.repr(values):.60}, expected whole numbers. Fix: {fix}"
        )
    return np.array([read_value(what, "int", v, fix) for v in values], dtype=np.int64)
