"""Advantages of groups: one number per sample, over the whole batch."""
