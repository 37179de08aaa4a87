"""torch's scaled_dot_product_attention, never by cuDNN: its backward gives NaN on Hopper at some lengths.

Reported as pytorch/pytorch#196678 (torch 2.11 and newer, which take cuDNN first) and NVIDIA/cudnn-frontend#160.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ALLOWED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Arguments and result are those of `torch.nn.functional.scaled_dot_product_attention`."""
    if query.device.type != "cuda" or query.dtype == torch.float32:
        return scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(ALLOWED):
        return scaled_dot_product_attention(query, key, value, **options)
