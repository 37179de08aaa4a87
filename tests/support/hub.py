"""The kernels of `hub/write.py`, written once per process, and imported as the package `kernels` does it."""

import functools
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = tempfile.TemporaryDirectory(prefix="mmpack-hub-")  # goes when the process ends


@functools.cache
def writer() -> ModuleType:
    """hub/write.py."""
    return _imported("mmpack_hub_write", ROOT / "hub" / "write.py")


@functools.cache
def project() -> Path:
    """The project's folder."""
    return writer().write(Path(_FOLDER.name))


def imported(variant: Path) -> ModuleType:
    """A built variant under its own name, wherever it lies."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    return sys.modules.get(name) or _imported(name, variant / "__init__.py")


def _imported(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
