"""Whether ops must give the same bits in any batch, at any price: switched by `mmpack.invariant`.

Ops that have faster ways otherwise ask here. The switch is the process's: gradients are computed in threads of their
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmpack.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

_depth = 0


def is_on() -> bool:
    """Whether this code runs within `batch_invariant`."""
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


def hold(x: Tensor) -> None:
    """See to it that the gradient to `x`, made in the mode, is computed in the mode."""
    if _depth > 0 and x.requires_grad:
        x.register_hook(_refuse_outside)


def _refuse_outside(grad: Tensor) -> None:
    if _depth == 0:
        raise ModelError(
            "batch_invariant: the backward runs outside batch_invariant, where bits depend on the batch, but "
            "its forward ran inside. Fix: call backward() within the block"
        )
