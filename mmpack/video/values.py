"""Values from JSON or a command line, read as a dataclass's annotation says: `int`, `float | None`, `tuple[…]`."""

from __future__ import annotations

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
    if isinstance(value, _KINDS.get(base, ())) and isinstance(value, bool) == (base == "bool"):
        return _PLAIN.get(base, lambda v: v)(value)
    raise ArgumentError(f"{what} is {value!r:.60}, expected {kind}. Fix: {fix}")
