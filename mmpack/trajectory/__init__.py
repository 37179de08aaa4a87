"""Trajectories of agents: turns as the policy saw them, their samples, typed actions, records of others (numpy)

Public names are loaded when first used: `import mmpack.trajectory` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "mmpack.trajectory.actions.find": ("annotate_actions", "check_actions", "find_actions"),
    "mmpack.trajectory.actions.formats": (
        "action_text",
        "read_action",
        "read_tool_call",
        "write_action",
        "write_tool_call",
    ),
    "mmpack.trajectory.actions.parts": ("loss_kinds",),
    "mmpack.trajectory.trajectory": ("Trajectory", "Turn"),
    "mmpack.trajectory.samples": ("to_samples",),
    "mmpack.trajectory.sample_turns": ("from_samples",),
    "mmpack.trajectory.cut": ("pieces",),
    "mmpack.trajectory.truncation": ("Context", "truncate", "window"),
    "mmpack.trajectory.groups": ("group_index", "trajectory_groups", "trajectory_index"),
    "mmpack.trajectory.branching": ("branches",),
    "mmpack.trajectory.records": ("Record", "from_records"),
    "mmpack.trajectory.chat": ("from_calls", "from_chat"),
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
