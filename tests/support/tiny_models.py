"""Tiny models of every family, by their kits."""

from __future__ import annotations

from typing import Any

import torch
from support.kits import get_kit


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """About 20 M parameters (hidden 128, tied embeddings; Qwen3.5 33 M), in eval mode, on the CPU.

    Raises: ArgumentError for a family that has no kit; ModelError where transformers lacks it.
    """
    return get_kit(family, "tiny_model").tiny(seed, dtype)


def tiny_qwen2_5_vl(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """`tiny_model("qwen2_5_vl")`."""
    return tiny_model("qwen2_5_vl", seed, dtype)
