"""Which frames of a video are taken, decoded and packed, by one plan on both sides.

Public names are loaded when first used: `import mmpack.video` loads neither torch nor av.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_HOME = {
    "mmpack.video.limits": ("Limits",),
    "mmpack.video.info": ("VideoInfo", "probe"),
    "mmpack.video.decode": ("decode",),
    "mmpack.video.cache": ("FrameCache",),
    "mmpack.video.plan": ("FramePlan",),
    "mmpack.video.sample": ("POLICIES", "sample"),
    "mmpack.video.hand_over": ("hf_kwargs", "hf_metadata", "vllm_item"),
    "mmpack.video.patches": (
        "PatchPlan",
        "normalization",
        "plan_patches",
        "row_view",
        "token_view",
    ),
    "mmpack.video.drop": ("drop_frames", "mask_frames"),
    "mmpack.ops.pack_video": ("pack_video", "unpack_video"),
    "mmpack.ops.patch_tables": ("PatchTables", "patch_tables"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


class _Package(ModuleType):
    """`mmpack.video.sample` is a function and a module: the public function keeps the name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mmpack.video' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Package
