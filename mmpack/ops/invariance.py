"""Whether ops must give the same bits in any batch, at any price: switched by `mmpack.invariant`.

Ops that have faster ways otherwise ask here. The switch is the process's: gradients are computed in threads of their
own.
"""

from __future__ import annotations

_depth = 0


def is_on() -> bool:
    return _depth > 0


def enter() -> int:
    """Switch on; returns how many times it was on already."""
    global _depth
    _depth += 1
    return _depth - 1


def leave() -> int:
    """Undo one `enter`; returns how many are left."""
    global _depth
    _depth -= 1
    return _depth
