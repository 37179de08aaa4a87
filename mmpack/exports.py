"""Public names of a package, each loaded from its home when first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmpack.errors import needs


def homes(package: str) -> dict[str, str]:
    """Public name -> module that holds it, as the package's `__init__.pyi` imports them: type checkers read it too."""
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


def exports(
    package: str, *, extra: str = "torch"
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of `package`. A name whose home is `package` itself is a submodule.

    `__getattr__` raises MissingExtraError, naming `extra`, where a home needs a package that is not installed.
    """
    home_of = homes(package)
    names = sorted(home_of)

    def load(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        with needs(extra, package):
            value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: names, names
