"""UniRL (0.2): the replay of its AR stages on packed, prefix-shared batches, and micro-batches in which groups meet.

One line of a recipe, `stack._target_: mmpack.adapters.unirl.Stack`, or one call, `enable(stack)`.

Run with unirl 0.2.0, transformers 5.12.1.
"""

from mmpack.errors import needs

with needs("unirl", __name__):
    import unirl  # noqa: F401

from mmpack.adapters.unirl.replay import Replay
from mmpack.adapters.unirl.stack import Planner, Stack, enable

__all__ = ["Planner", "Replay", "Stack", "enable"]
