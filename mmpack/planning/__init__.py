"""Which samples share a micro-batch, and which rank runs it: costs, budgets, bins, balance. numpy only."""
