"""How much each teacher counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of


def weights_of(what: str, teachers: Mapping[str, Any], weights: Any) -> dict[str, float]:
    """The weight of each teacher; 1 where there are no weights."""
    if weights is None:
        return dict.fromkeys(teachers, 1.0)
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"{what}: weights is {kind_of(weights)}, expected a mapping by teacher. Fix: pass {{'teacher': 1.0}}"
        )
    if missing := [name for name in teachers if name not in weights]:
        raise ArgumentError(
            f"{what}: weights lacks {missing[0]!r:.40}. Fix: pass one for each teacher, 0 to leave one out"
        )
    for name, weight in weights.items():
        check_number(what, f"weights[{name!r:.40}]", weight, least=0)
    return {name: float(weights[name]) for name in teachers}


def weighed(values: Tensor, weight: Tensor | float) -> Tensor:
    """weight · values; 0 where the weight is 0, whatever the value is."""
    factor = weight if isinstance(weight, Tensor) else values.new_full((), weight)
    return torch.where(factor == 0, 0.0, values * factor)
