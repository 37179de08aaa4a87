"""mmpack: the data layer of multimodal RL.

Public names are loaded when first used: `import mmpack` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from mmpack._version import __version__

_HOME = {
    "mmpack.schema.sample": ("Sample",),
    "mmpack.schema.media": ("Medium",),
    "mmpack.schema.spans": (
        "ActionSpan",
        "BboxTarget",
        "LossSpan",
        "ModalitySpan",
        "ObservationSpan",
        "PointTarget",
        "PolicyVersion",
        "RegionSpan",
        "Score",
    ),
    "mmpack.schema.rules": ("Problem", "check", "validate"),
    "mmpack.schema.trace": ("read_trace", "write_trace"),
    "mmpack.layout.mrope": ("mrope_positions",),
    "mmpack.processors.wrap": ("wrap_processor",),
    "mmpack.plan.plan": ("Plan", "plan"),
    "mmpack.ops.selected_logprobs": ("selected_logprobs",),
    "mmpack.ops.linear_selected_logprobs": ("linear_selected_logprobs",),
    "mmpack.ops.merge_embeddings": ("merge_embeddings",),
    "mmpack.pack.batch": ("PackedBatch",),
    "mmpack.pack.collate": ("collate",),
    "mmpack.pack.pack": ("pack",),
    "mmpack.pack.pad": ("PaddedBatch", "pad"),
    "mmpack.rewards.scatter": ("scatter_rewards",),
    "mmpack.losses.advantages": ("group_advantages",),
    "mmpack.losses.gae": ("gae",),
    "mmpack.losses.policy": ("PolicyLoss", "policy_loss"),
    "mmpack.losses.value": ("value_loss",),
    "mmpack.parity.compare": ("compare",),
    "mmpack.parity.report": ("Finding", "ParityReport"),
    "mmpack.errors": (
        "ArgumentError",
        "BackendError",
        "LayoutError",
        "MissingExtraError",
        "MmpackError",
        "ModelError",
        "PlanError",
        "SchemaError",
        "TraceError",
        "VideoError",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_ROOMS = ("video",)  # packages that are public by their own name, as in mp.video.sample

__all__ = ["__version__", *sorted([*_MODULE_OF, *_ROOMS])]


class _Package(ModuleType):
    """`mmpack.plan` and `mmpack.pack` are functions and packages: the public function keeps the name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"mmpack.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mmpack' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Package
