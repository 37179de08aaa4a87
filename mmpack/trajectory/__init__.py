"""Trajectories of agents that see: what a policy saw, thought, did and got back; typed actions (numpy)."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "mmpack.schema.actions": (
        "Action",
        "Answer",
        "Click",
        "DoubleClick",
        "Drag",
        "Key",
        "LongPress",
        "Move",
        "OpenApp",
        "Scroll",
        "Swipe",
        "SystemButton",
        "Terminate",
        "ToolCall",
        "TripleClick",
        "Type",
        "Wait",
    ),
    "mmpack.schema.json_schema": ("action_schema",),
    "mmpack.trajectory.annotate": ("annotate_actions", "check_actions"),
    "mmpack.trajectory.find": ("FoundActions", "find_actions"),
    "mmpack.trajectory.formats": ("action_text", "read_action", "write_action"),
    "mmpack.trajectory.formats.openai": ("read_tool_call", "write_tool_call"),
    "mmpack.trajectory.kinds": ("loss_kinds",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mmpack.trajectory' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
