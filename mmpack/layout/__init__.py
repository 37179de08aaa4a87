"""Grids to positions, settings to fingerprints, pixels to cache keys. numpy only."""
