"""Rows gathered by index, and rows summed by index: each is the gradient of the other."""
