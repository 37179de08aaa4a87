"""Which samples share a micro-batch, and which rank runs it: budgets, bins, balance, prefix forest.
numpy only.
"""
