"""Rewards and costs apart: each under its own names, and one place where multipliers weigh them against each other."""

from mmpack.losses.constrained.advantages import constrained_advantages
from mmpack.losses.constrained.multiplier import PID, DualAscent, LagrangeMultiplier
from mmpack.losses.constrained.named import (
    CostAdvantages,
    Costs,
    RewardAdvantages,
    Rewards,
)
from mmpack.losses.constrained.scatter import scatter_costs

__all__ = [
    "PID",
    "CostAdvantages",
    "Costs",
    "DualAscent",
    "LagrangeMultiplier",
    "RewardAdvantages",
    "Rewards",
    "constrained_advantages",
    "scatter_costs",
]
