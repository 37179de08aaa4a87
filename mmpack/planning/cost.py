"""What a micro-batch costs; a rank's load is the sum over its micro-batches.

`rows`: packed. `pairs`: the sum of L² over samples, for a tree of depths [a, b) the sum of b² - a².
`patches`: before merging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmpack.errors import check_number

Cost = Callable[[int, int, int], float]  # (rows, pairs, patches) -> cost, additive over samples


@dataclass(frozen=True)
class CostModel:
    """cost = linear · rows + quadratic · pairs + patch · patches, any unit.

    Source: a dense transformer of n layers and width d takes 24·n·d² FLOPs per token in its matrix
    products and 2·n·d·L² in attention (Kaplan et al. 2020, "Scaling Laws for Neural Language
    Models", section 2.1). Divided by 2·n·d with n = 32 and d = 4,096 (a 7B model) that is 12·d =
    49,152 per row and 1 per pair. A vision tower of 32 layers and width 1,280 takes 24·32·1,280² FLOPs
    per patch: 4,800 in the same unit.
    """

    linear: float = 49_152.0
    quadratic: float = 1.0
    patch: float = 4_800.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("CostModel", name, value, least=0)

    def __call__(self, rows: int, pairs: int, patches: int) -> float:
        return self.linear * rows + self.quadratic * pairs + self.patch * patches
