"""Frames to patches [rows, patch_dim] and back, by one table of places."""
