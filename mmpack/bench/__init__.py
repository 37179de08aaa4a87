"""Whole training steps, timed beside peers: models of real shapes with random weights, on the device that is here."""
