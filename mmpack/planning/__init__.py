"""Which samples share a micro-batch, and which rank runs it: cost, memory, budgets, bins, balance (numpy)."""
