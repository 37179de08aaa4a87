"""Reading and decoding sound: samples float32 [n] of one channel, at the rate that a model hears.

Public names are loaded when first used: `import mmpack.audio` loads no decoder.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"mmpack.audio.decoding": ("Limits", "decode")}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mmpack.audio' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
