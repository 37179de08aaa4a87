"""Numbers that change from call to call, in the form in which a custom op should take them."""

from __future__ import annotations

import torch
from torch import Tensor


def runtime_scalar(value: float, device: torch.device) -> Tensor:
    """`value` as a tensor [] float64 on `device`, without waiting for it.

    For a float that reaches a custom op torch.compile makes a program of its own, and a CUDA graph keeps it.
    """
    if torch.compiler.is_compiling():
        return torch.ones((), dtype=torch.float64, device=device) * value  # a product stays open
    return torch.full((), value, dtype=torch.float64, device=device)
