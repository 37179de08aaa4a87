"""Which samples share a micro-batch, and which rank runs it: cost, memory, budgets, bins, balance (numpy)."""

from mmpack.planning.calibration import Calibration, calibrate
from mmpack.planning.cost import CostModel, Speeds, cost_model
from mmpack.planning.counts import Counts

__all__ = ["Calibration", "CostModel", "Counts", "Speeds", "calibrate", "cost_model"]
