"""Plans: dataclasses whose tensors move to a device together."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="Moving")
Move = Callable[[Tensor], Tensor]


def moved_to(value: Any, move: Move) -> Any:
    """`value` with its tensors moved, and those in NamedTuples, lists and dataclasses; itself where it has none."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, list) or hasattr(value, "_fields"):
        parts = [moved_to(x, move) for x in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return parts if isinstance(value, list) else value._make(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (f.name for f in dataclasses.fields(value))
        return dataclasses.replace(
            value, **{name: moved_to(getattr(value, name), move) for name in names}
        )
    return value


class Moving(ABC):
    """Base: a plan's tensors move, and what was made for this process or device is left behind."""

    unresolved: ClassVar[dict[str, Any]] = {}  # the fields of what is left behind, empty

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the plan's tensors."""

    def to(self: Self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The plan with its tensors on `device`; this one, resolved or not, if they are there."""
        if self.device == torch.device(device):
            return self
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self: Self) -> Self:
        return self._moved(Tensor.pin_memory)

    def _moved(self: Self, move: Move) -> Self:
        return moved_to(self._bare(), move)

    def _bare(self: Self) -> Self:
        empty = {n: dict(x) if isinstance(x, dict) else x for n, x in self.unresolved.items()}
        return dataclasses.replace(self, **empty)  # type: ignore[type-var]

    def __getstate__(self) -> dict[str, Any]:
        """Without what was resolved: it belongs to this process, and FlexAttention's mask can't be pickled."""
        return vars(self._bare())
