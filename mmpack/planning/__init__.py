"""Which samples share a micro-batch, and which rank runs it: cost, memory, budgets, bins, balance (numpy)."""

from mmpack.planning.calibration import calibrate
from mmpack.planning.cost import CostModel, cost_model
from mmpack.planning.counts import Counts

__all__ = ["CostModel", "Counts", "calibrate", "cost_model"]
