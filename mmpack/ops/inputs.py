"""What every tensor that is handed to an op has to be, whatever the op."""

from __future__ import annotations

from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.light import refuse_transforms


def check_tensors(what: str, **tensors: Tensor | None) -> None:
    """Raise ArgumentError for tensors that are on unlike devices, sharded, or carry forward-mode tangents."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first, *others = given
    for name in others:
        if given[name].device != given[first].device:
            raise ArgumentError(
                f"{what}: {first} is on {given[first].device} and {name} on {given[name].device}. "
                f"Fix: put all on one device"
            )
    for name, x in given.items():
        if hasattr(x, "full_tensor"):
            raise ArgumentError(
                f"{what}: {name} is a DTensor, of which this rank has a part. Fix: call it within the forward of the "
                f"module that fully_shard wraps, or pass {name}.full_tensor()"
            )
    refuse_transforms(what, *given.values())
