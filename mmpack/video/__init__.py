"""Which frames of a video are taken (plans, by policy), reading and decoding files, patch order.

Public names are loaded when first used: `import mmpack.video` loads neither torch nor av.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "mmpack.video.limits": ("Limits",),
    "mmpack.video.info": ("probe",),
    "mmpack.video.decoding": ("decode",),
    "mmpack.video.cache": ("FrameCache",),
    "mmpack.video.frame_plan": ("FramePlan",),
    "mmpack.video.choose_frames": ("sample",),
    "mmpack.video.patches": ("plan_patches",),
    "mmpack.video.pixel_settings": ("normalization",),
    "mmpack.video.drop": ("drop_frames", "mask_frames"),
    "mmpack.ops.patches.pack": ("pack_video", "unpack_video"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mmpack.video' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
