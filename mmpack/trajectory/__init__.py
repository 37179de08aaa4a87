"""Trajectories of agents: turns as the policy saw them, their samples, typed actions, records of others (numpy)

Public names are loaded when first used: `import mmpack.trajectory` loads neither torch nor transformers.
"""

from mmpack.exports import exports

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
__getattr__, __dir__, __all__ = exports(__name__, _HOME)
