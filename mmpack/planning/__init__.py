"""Which samples share a micro-batch, and which rank runs it: cost, budgets, bins, balance (numpy)."""
