"""Public names of a package, each loaded from its home when first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mmpack.errors import needs


def exports(
    package: str,
    homes: Mapping[str, tuple[str, ...]],
    rooms: tuple[str, ...] = (),
    *,
    extra: str = "torch",
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`: names by the modules that hold them, and packages within it.

    What a module lacks to be imported raises MissingExtraError, which names `extra`.
    """
    module_of = {name: module for module, names in homes.items() for name in names}
    names = sorted([*module_of, *rooms])

    def load(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs(extra, package):
            value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: names, names
