"""Registration of ops whose kernel is short beside the call: as `torch.library.custom_op`, without its wrappers.

`custom_op` and its `register_autograd` take several times the host time that the launch takes. Gradients of these ops
come from a `torch.autograd.Function` around the op, which torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mmpack.errors import ArgumentError

_LIBRARY = torch.library.Library("mmpack", "FRAGMENT")


def light_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define mmpack::NAME, which mutates nothing, for every device; returns the op.

    Args: schema: "name(Tensor x, …) -> Tensor". run: gets the arguments in the order of the schema. fake: the same
    for tensors without data, returns empty ones.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mmpack::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mmpack, name).default


def refuse_tangents(what: str, *tensors: Tensor) -> None:
    """Raise ArgumentError in forward-mode AD: without a formula for it torch would drop the tangents without a word."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ArgumentError(
            f"{what}: it has no forward-mode derivative. Fix: differentiate backward, or detach its inputs"
        )
