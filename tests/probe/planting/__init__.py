"""Faults planted in models and in their inputs, each with the module and the token that must be found."""

from planting import attention, inputs, weights
from planting.registry import PLANTS, Plant
from planting.scene import FAMILIES, Answer, Scene

__all__ = ["FAMILIES", "PLANTS", "Answer", "Plant", "Scene", "attention", "inputs", "weights"]
