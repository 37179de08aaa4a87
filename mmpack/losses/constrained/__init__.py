"""Rewards and costs apart: each under its own names, and one place where multipliers weigh them against each other."""

from mmpack.losses.constrained.multiplier import (
    PID,
    DualAscent,
    LagrangeMultiplier,
    constrained_advantages,
)
from mmpack.losses.constrained.named import Costs, Rewards

__all__ = ["PID", "Costs", "DualAscent", "LagrangeMultiplier", "Rewards", "constrained_advantages"]
