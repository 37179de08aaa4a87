"""Values from JSON or a command line, read as a dataclass's annotation says: `int`, `float | None`, `tuple[…]`."""

from __future__ import annotations

import functools
import reprlib
from types import EllipsisType, NoneType, SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from mmpack.errors import ArgumentError

_ACCEPTED: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int, np.integer),
    float: (int, float, np.integer, np.floating),
    str: (str,),
    dict: (dict,),
}
_CONVERTED = (int, float)
_MOST = 2**63  # whole numbers are int64 in arrays and records


def read_value(what: str, kind: str, value: Any, fix: str) -> Any:
    """`value` as the annotation `kind`, plain Python. Raises: ArgumentError naming `what`, ending in `fix`.

    Example:
        >>> from mmpack.video.values import read_value
        >>> read_value("fps", "float | None", 2, "pass a rate"), read_value("size", "tuple[int, ...]", [4, 6], "")
        (2.0, (4, 6))
    """
    return _read(what, _type_of(kind), kind, value, fix)


def read_numbers(what: str, values: Any, fix: str) -> np.ndarray:
    """int64 [n] of a list, tuple, range, array or tensor. Raises: ArgumentError where one is no whole number."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | dict) or not hasattr(values, "__iter__"):
        raise ArgumentError(
            f"{what} is {reprlib.repr(values):.60}, expected whole numbers. Fix: {fix}"
        )
    return np.array([read_value(what, "int", v, fix) for v in values], dtype=np.int64)


@functools.cache
def _type_of(annotation: str) -> Any:
    """The type that an annotation of builtins and Any names."""
    holder = SimpleNamespace(__annotations__={"kind": annotation})
    return get_type_hints(holder, localns={"Any": Any})["kind"]


def _read(what: str, kind: Any, shown: str, value: Any, fix: str) -> Any:
    members = get_args(kind) if NoneType in get_args(kind) else (kind,)
    if value is None and NoneType in members:
        return None
    base = next(member for member in members if member is not NoneType)
    of, base = get_args(base), get_origin(base) or base
    is_tuple = base is tuple and isinstance(value, list | tuple)
    if is_tuple and (isinstance(of[-1], EllipsisType) or len(of) == len(value)):
        return tuple(_read(what, of[0], of[0].__name__, v, fix) for v in value)
    if isinstance(value, int) and not -_MOST <= value < _MOST:
        raise ArgumentError(f"{what} is a number beyond 64 bits. Fix: {fix}")
    if isinstance(value, _ACCEPTED.get(base, ())) and isinstance(value, bool) == (base is bool):
        return base(value) if base in _CONVERTED else value
    raise ArgumentError(f"{what} is {reprlib.repr(value):.60}, expected {shown}. Fix: {fix}")
