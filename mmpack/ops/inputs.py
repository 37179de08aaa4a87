"""What every public function requires of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.custom_op import refuse_transforms


def check_are_tensors(what: str, optional: Collection[str] = (), **tensors: Any) -> None:
    """Raise ArgumentError for all but dense tensors; those in `optional` may be None."""
    for name, x in tensors.items():
        if not (isinstance(x, Tensor) or (x is None and name in optional)):
            raise ArgumentError(
                f"{what}: {name} is {kind_of(x)}, expected a tensor. Fix: {_fix(name, x)}"
            )
        if x is not None and x.layout is not torch.strided:
            raise ArgumentError(
                f"{what}: {name} is a tensor of layout {x.layout}, expected a dense one. Fix: pass {name}.to_dense()"
            )


def _fix(name: str, x: Any) -> str:
    if x is None:
        return "pass a tensor"
    if isinstance(x, list | tuple) and any(isinstance(value, str) for value in x):
        return f"number its texts, then pass torch.as_tensor({name})"
    # a type that must not become a tensor says what to do instead
    return getattr(type(x), "instead_of_a_tensor", f"pass torch.as_tensor({name})")


def check_tensors(what: str, optional: Collection[str], **tensors: Any) -> None:
    """Raise ArgumentError for what is no tensor, on another device, a DTensor, or has a forward-mode tangent."""
    check_are_tensors(what, optional, **tensors)
    given: dict[str, Tensor] = {name: x for name, x in tensors.items() if x is not None}
    first, *others = given
    for name in others:
        if given[name].device != given[first].device:
            raise ArgumentError(
                f"{what}: {first} is on {given[first].device} and {name} on {given[name].device}. "
                f"Fix: move all to one device"
            )
    for name, x in given.items():
        if hasattr(x, "full_tensor"):
            raise ArgumentError(
                f"{what}: {name} is a DTensor, and this rank has only a part of it. "
                "Fix: call this within the forward of the "
                f"module that fully_shard wraps, or pass {name}.full_tensor()"
            )
    refuse_transforms(what, *given.values())


def check_shapes(what: str, fix: str, **tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Raise ArgumentError where a tensor has not the shape that is given with it; returns the sizes by name.

    A name has one size in all of them: `check_shapes("rms_norm", "…", x=(x, "T N"), weight=(weight, "N"))["N"]`. A
    tensor may be None.
    """
    sizes: dict[str, int] = {}
    for name, (x, shape) in tensors.items():
        if x is None:
            continue
        dims, known = shape.split(), dict(sizes)
        fits = x.ndim == len(dims)
        fits = fits and all(sizes.setdefault(d, n) == n for d, n in zip(dims, x.shape, strict=True))
        if not fits:
            expected = ", ".join(str(known.get(d, d)) for d in dims)
            raise ArgumentError(
                f"{what}: {name} has shape {list(x.shape)}, expected [{expected}]. Fix: {fix}"
            )
    return sizes


def check_floats(what: str, fix: str, **tensors: Tensor | None) -> None:
    """Raise ArgumentError for what is not of a floating dtype."""
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise ArgumentError(
                f"{what}: {name} is {x.dtype}, expected a floating dtype. Fix: {fix}"
            )


def check_index(
    what: str,
    name: str,
    index: Tensor,
    bound: int | None = None,
    device: torch.device | None = None,
    low: int = 0,
) -> None:
    """Raise ArgumentError for what is no index [n] on `device`, and on the CPU for one outside [low, bound)."""
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            f"{what}: {name} has shape {list(index.shape)} and dtype {index.dtype}, expected one dimension of "
            "int64 or int32. Fix: pass row numbers, or token ids as targets"
        )
    if device is not None and index.device != device:
        raise ArgumentError(
            f"{what}: {name} is on {index.device}, the rows are on {device}. Fix: move it, as batch.to does"
        )
    if bound is not None and can_look_at(index) and len(index):
        least, most = (int(x) for x in index.aminmax())
        if least < low or most >= bound:
            raise ArgumentError(
                f"{what}: {name} runs from {least} to {most}, expected [{low}, {bound}). "
                "Fix: pass token ids as targets, and numbers of rows that exist"
            )


def can_look_at(x: Tensor) -> bool:
    """Whether values may be read: on a GPU that would wait, and fake or traced tensors have none."""
    plain = type(x) is Tensor and x.device.type == "cpu"
    return plain and not torch.compiler.is_compiling()
