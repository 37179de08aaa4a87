"""The demonstration: drawn problems and clips, tiny models, the step of `mmpack smoke` with all its checks.

Public names are loaded when first used, and torch and transformers with those that need them.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Exercise": "datasets",
    "clip_exercises": "clips",
    "load_exercises": "datasets",
    "qwen_vl_processor": "qwen_processor",
    "tiny_model": "tiny_models",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmpack.demo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mmpack.demo.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
